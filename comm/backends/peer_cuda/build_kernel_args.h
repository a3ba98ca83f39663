#pragma once
/// Turns an operation into what a kernel is told (peer_call.h): pure functions.

#include "comm/backends/peer_cuda/peer_arenas.h"
#include "comm/collective.h"
#include "comm/tuning/select_cuda.h"

namespace rz {

/// Where peers can read an operation's memory: what letters call it (peer_call.h). 0: nowhere.
struct PeerHandles {
  std::uint64_t in = 0, out = 0;
};

CudaLaunchPlan plan_launch(const CollectiveCall&, const peer::DeviceComm&, const std::string& forced);
peer::ReduceArgs reduce_args(const CollectiveCall&, const peer::DeviceComm&, const CudaLaunchPlan&,
                             PeerHandles);
peer::CopyArgs copy_args(const CollectiveCall&, const peer::DeviceComm&, const CudaLaunchPlan&, PeerHandles);

/// The signature of a call, and in words, e.g. "all_reduce (sum) of 12 f32".
std::uint64_t packed_signature(const CollectiveCall&);
std::string to_string(std::uint64_t what, std::uint64_t count);

}  // namespace rz
