#pragma once
/// Translates calls to kernel arguments (kernel_args.h). Pure functions.

#include "comm/backends/peer_cuda/peer_arenas.h"
#include "comm/collective.h"
#include "comm/tuning/select_cuda.h"

namespace rz {

/// Locations of an operation's operands for peers, encoded as peer::SyncSlot::source. 0: peers cannot access
/// the operand.
struct PeerHandles {
  std::uint64_t in = 0, out = 0;
};

tuning::CudaLaunchPlan plan_launch(const CollectiveCall&, const peer::DeviceComm&, const std::string& forced);
peer::ReduceArgs reduce_args(const CollectiveCall&, const peer::DeviceComm&, const tuning::CudaLaunchPlan&,
                             PeerHandles);
peer::CopyArgs copy_args(const CollectiveCall&, const peer::DeviceComm&, const tuning::CudaLaunchPlan&,
                         PeerHandles);

/// The signature of a call for the mismatch check, and its text with a count, e.g. "all_reduce (sum) of 12
/// f32".
std::uint64_t packed_signature(const CollectiveCall&);
std::string to_string(std::uint64_t signature, std::uint64_t count);

}  // namespace rz
