#pragma once
/// Communication hooks under the names of PyTorch's default hooks.

#include <memory>

#include "sharding/model/communication_hook.h"

namespace rz {

/// The mean of gradients that are divided by the number of ranks and rounded to 16 bits: as with
/// communication_data_type and prescale_gradients, which every strategy has.
std::shared_ptr<CommunicationHook> make_fp16_compress_hook();
std::shared_ptr<CommunicationHook> make_bf16_compress_hook();

}  // namespace rz
