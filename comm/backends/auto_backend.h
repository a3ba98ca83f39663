#pragma once
/// Backend selection for device memory with backend "auto": NCCL if every rank can use it, else peer_cuda,
/// else host-staged copies. Every rank decides from the same gathered data, so all ranks choose alike.

#include <span>
#include <string>
#include <vector>

#include "comm/backend.h"
#include "comm/options.h"

namespace rz {

struct DeviceRank {
  std::string node;           ///< equal for ranks that may share memory
  std::string gpu_uuid;       ///< equal for ranks that share a GPU
  int nccl_version = 0;       ///< of this rank's NCCL; 0: no usable NCCL
  int unreachable_rank = -1;  ///< lowest rank whose GPU memory this rank's GPU cannot access; -1: none
};

struct BackendChoice {
  std::string backend;  ///< "nccl", "peer_cuda" or "native" (staged)
  std::string reason;   ///< e.g. "every rank has a GPU of its own"
};

/// Pure function; `ranks` is indexed by rank. A group of one rank uses "peer_cuda", which loads no library
/// and copies within the GPU.
BackendChoice choose_backend(std::span<const DeviceRank> ranks, bool deterministic);

/// Collective: gathers the input of choose_backend over `host`. Loads NCCL only if no two ranks share a GPU.
std::vector<DeviceRank> gather_device_ranks(Backend& host, int rank, int size, const CommOptions&);

}  // namespace rz
