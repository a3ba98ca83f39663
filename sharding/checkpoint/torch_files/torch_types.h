#pragma once
/// Names of PyTorch in pickles.

#include <string_view>

#include "sharding/checkpoint/torch_files/pickle.h"

namespace rz {

struct TorchType {
  const char* storage;  ///< "torch.FloatStorage"; empty for a type without one
  const char* dtype;    ///< "torch.float32"
  const char* name;     ///< in safetensors; empty if they lack it
  unsigned bytes;
};
/// The type of a storage's class, or of a dtype; nullptr for another name.
const TorchType* torch_type(std::string_view name);
bool is_untyped_storage(std::string_view name);
/// torch.Tensor or torch.nn.Parameter.
bool is_tensor_type(std::string_view name);
inline constexpr std::string_view rebuild_from_type = "torch._tensor._rebuild_from_type_v2";

/// What a pickle of tensors may do with a name.
PickleUse use_in_weights(std::string_view name);
/// The same for files of DeepSpeed, whose classes are records.
PickleUse use_in_deepspeed(std::string_view name);

}  // namespace rz
