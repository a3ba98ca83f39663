#pragma once
/// How the ranks of a NCCL communicator find each other: each says in the store who and where it is, rank 0
/// hands out NCCL's unique id.

#include <memory>
#include <string>

#include "comm/backends/nccl/api/api.h"
#include "comm/core/deadline.h"
#include "comm/core/types.h"
#include "comm/store.h"

namespace rz::nccl {

struct RankInfo {
  int rank = 0, size = 1;
  Device device;
  int version = 0;          ///< of NCCL
  std::string host_id;      ///< NCCL_HOSTID; ranks for which it differs may share a GPU, in NCCL's eyes
  bool shares_gpu = false;  ///< NCCL_MULTI_RANK_GPU_ENABLE=1
};

/// Every rank calls it. Errc::timeout names the ranks that did not come; Errc::config, one line on every
/// rank, two that are on one GPU, or have different versions of NCCL.
UniqueId exchange_unique_id(const NcclApi&, const RankInfo&, Store&, Deadline);

/// After meet(): notes that this rank calls ncclCommInitRank now.
void mark_joining(const RankInfo&, Store&);
/// Which ranks have not, for an error: " ranks 1 2", or empty.
std::string ranks_not_joined(const RankInfo&, Store&);

}  // namespace rz::nccl
