#pragma once
/// Inputs that cannot be read where they are.

#include <cstddef>
#include <memory>

#include "comm/collective.h"
#include "comm/transport/transport.h"

namespace rz {

/// Replaces the input of a call by a copy where it cannot be read in place: scaled for premul_sum, and for a
/// call `by_schedule` of all_to_all in place, which overwrites shards that are yet to be sent. The intra-node
/// engine stages those before it reads. Returns the copy, which must outlive the call; null if the input is
/// read in place or was scaled in the output.
std::shared_ptr<std::byte> stage_input(CollectiveCall&, bool by_schedule, Transport&);

}  // namespace rz
