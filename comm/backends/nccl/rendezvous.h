#pragma once
/// Setup of an NCCL communicator through the store: ranks exchange their GPU and version, rank 0 publishes
/// NCCL's unique id.

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
  int version = 0;          ///< version of NCCL
  std::string host_id;      ///< NCCL_HOSTID; NCCL lets ranks with different values share a GPU
  bool shares_gpu = false;  ///< NCCL_MULTI_RANK_GPU_ENABLE=1
};

/// Collective over the store. Errc::timeout names the ranks that did not arrive. Errc::config, the same line
/// on every rank, names two ranks on one GPU or with different versions of NCCL.
UniqueId exchange_unique_id(const NcclApi&, const RankInfo&, Store&, Deadline);

/// Call after exchange_unique_id(): records that this rank is about to call ncclCommInitRankConfig.
void mark_joining(const RankInfo&, Store&);
/// Ranks that have not called mark_joining(), for an error message: " 1 2", or empty.
std::string ranks_not_joined(const RankInfo&, Store&);

}  // namespace rz::nccl
