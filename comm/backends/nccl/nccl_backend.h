#pragma once
/// Collectives on device memory by NCCL (2.18 or newer), with our failures: deadlines, and culprits by name.
///
/// Operations run in a stream of the backend's own, in the order of their submission, after what is in their
/// own streams; Work::wait_on() orders by events and never blocks. (The first of a kind blocks in its call
/// until its peers call too, while NCCL connects them.) In a CUDA graph's capture they become part
/// of the graph, and deadlines do not apply to its launches; launches of graphs that hold operations of one
/// communicator must not run beside each other, as with NCCL itself. Sends and receives that wait for each
/// other belong in one group: unlike the host's messages they run one after the other.

#include <chrono>
#include <memory>
#include <string>

#include "comm/backend.h"
#include "comm/backends/nccl/api/api.h"
#include "comm/core/environment.h"
#include "comm/store.h"

namespace rz::nccl {

struct NcclOptions {
  int rank = 0, size = 1;
  Device device;
  /// Sums in rank order, with the host's bits, of up to 256 ranks; else NCCL's own.
  bool deterministic = true;
  std::chrono::milliseconds rendezvous_timeout{30'000};
  std::chrono::milliseconds timeout{600'000};       ///< of one operation, from its submission
  std::chrono::milliseconds finalize_limit{5'000};  ///< for ncclCommFinalize, before an abort
  std::chrono::milliseconds abort_limit{2'000};     ///< for ncclCommAbort, before it is left behind
  std::chrono::milliseconds inquiry_limit{1'500};   ///< for the ranks' answers after a deadline
  /// Of device memory that one operation may need on its way; larger ones go in slices. The same on every
  /// rank.
  std::size_t workspace_limit = std::size_t{64} << 20;
  std::string host_id = environment().nccl_host_id;
  bool shares_gpus = environment().nccl_shares_gpus;
};

/// Every rank calls it. `host` is another backend of the same ranks, aborted with this one. Errc::timeout
/// names ranks that do not come, Errc::config two on one GPU, Errc::unsupported a NCCL that is too old.
std::unique_ptr<Backend> nccl_backend(const NcclApi&, std::shared_ptr<Store>, std::shared_ptr<Backend> host,
                                      const NcclOptions&);

}  // namespace rz::nccl
