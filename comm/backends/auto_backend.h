#pragma once
/// What carries device memory where nobody has said it ("auto"): NCCL where it can, else our own kernels,
/// else the way through pinned host memory. Decided from what all ranks tell each other, so alike on every
/// rank.

#include <span>
#include <string>
#include <vector>

#include "comm/backend.h"
#include "comm/communicator.h"

namespace rz {

struct DeviceRank {
  std::string host;           ///< alike for ranks that may share memory
  std::string gpu_uuid;       ///< alike for ranks that share a card
  int nccl_version = 0;       ///< its NCCL's version; 0: none that serves
  int unreachable_rank = -1;  ///< the first rank whose card's memory its own does not reach; -1: none
};

struct BackendChoice {
  std::string backend;  ///< "nccl", "peer_cuda" or "native" (staged)
  std::string reason;   ///< e.g. "every rank has a GPU of its own"
};

/// A pure function; `ranks` in the order of their numbers. A rank alone has "peer_cuda", which loads nothing
/// and copies within the card.
BackendChoice choose_backend(std::span<const DeviceRank> ranks, bool deterministic);

/// What choose_backend needs; every rank calls it, and they talk over `host`. Looks for NCCL only where it
/// could serve.
std::vector<DeviceRank> gather_device_ranks(Backend& host, int rank, int size, const CommOptions&);

}  // namespace rz
