#pragma once
/// Collectives on device memory by NCCL (2.18 or newer), with ringzero's failure handling: deadlines, and
/// errors that name a culprit.
///
/// Operations run in the backend's own stream, in submission order, each after the work in its own stream.
/// Work::wait_on() orders streams by events and never blocks. submit() blocks for the first operation of a
/// kind until its peers submit it too, while NCCL connects them. Operations submitted during a CUDA graph
/// capture become part of the graph; deadlines do not apply to its launches. As with NCCL itself, graphs with
/// operations of one communicator must not run concurrently. Sends and receives that depend on each other
/// must be in one group: unlike on the host, they run one after the other.

#include <chrono>
#include <memory>
#include <string>

#include "comm/backend.h"
#include "comm/backends/nccl/api/api.h"
#include "comm/core/environment.h"
#include "comm/core/long_wait.h"
#include "comm/store.h"

namespace rz::nccl {

struct NcclOptions {
  int rank = 0, size = 1;
  Device device;
  /// Reduce in rank order, with the same bits as on the host, for up to 256 ranks; otherwise NCCL chooses the
  /// order.
  bool deterministic = true;
  std::chrono::milliseconds rendezvous_timeout{30'000};
  std::chrono::milliseconds timeout{600'000};       ///< of one operation, from its submission
  std::chrono::milliseconds finalize_limit{5'000};  ///< for ncclCommFinalize, before the abort
  std::chrono::milliseconds abort_limit{2'000};     ///< for ncclCommAbort; then the call is abandoned
  std::chrono::milliseconds inquiry_limit{1'500};   ///< for the replies of the other ranks after a deadline
  /// Bytes of device workspace for one operation; larger operations are cut into chunks. The same on every
  /// rank.
  std::size_t workspace_limit = std::size_t{64} << 20;
  std::string host_id = environment().nccl_host_id;
  bool shares_gpus = environment().nccl_shares_gpus;
  WaitReportOptions waits;
};

/// Collective over the store. `host` is another backend of the same ranks; a failure of this backend aborts
/// it, too. Errc::timeout names ranks that did not arrive. Errc::config names two ranks on one GPU or with
/// different versions of NCCL. Errc::unsupported: NCCL is too old, or too many ranks for rank-ordered
/// reductions.
std::unique_ptr<Backend> nccl_backend(const NcclApi&, std::shared_ptr<Store>, std::shared_ptr<Backend> host,
                                      const NcclOptions&);

}  // namespace rz::nccl
