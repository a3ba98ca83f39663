#include "comm/backends/auto_backend.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "comm/backends/nccl/api/api.h"
#include "comm/backends/peer_cuda/kernels/peer_kernels.h"
#include "comm/bootstrap/device_location.h"
#include "comm/core/error.h"

namespace rz {

namespace {

using Ranks = std::span<const DeviceRank>;

/// The first pair of ranks on one GPU, ordered by the higher rank.
std::optional<std::pair<std::size_t, std::size_t>> find_shared_gpu(Ranks ranks) {
  for (std::size_t b = 1; b < ranks.size(); ++b)
    for (std::size_t a = 0; a < b; ++a)
      if (ranks[a].gpu_uuid == ranks[b].gpu_uuid) return std::pair{a, b};
  return std::nullopt;
}

/// The reason why NCCL cannot serve the group; empty if it can. Reasons that no installation can fix come
/// first.
std::string reason_against_nccl(Ranks ranks, bool deterministic) {
  if (const auto pair = find_shared_gpu(ranks))
    return concat("ranks ", pair->first, " and ", pair->second, " share a GPU");
  if (deterministic && ranks.size() > PeerKernels::max_sources)
    return concat("sums in rank order over NCCL serve at most ", PeerKernels::max_sources, " ranks");
  for (std::size_t r = 0; r < ranks.size(); ++r)
    if (ranks[r].nccl_version == 0) return concat("rank ", r, " has no NCCL that serves");
  for (std::size_t r = 1; r < ranks.size(); ++r)
    if (ranks[r].nccl_version != ranks[0].nccl_version)
      return concat("rank 0 has NCCL ", nccl::version_text(ranks[0].nccl_version), " and rank ", r, " ",
                    nccl::version_text(ranks[r].nccl_version));
  return "";
}

std::string reason_against_peer_cuda(Ranks ranks) {
  for (std::size_t r = 1; r < ranks.size(); ++r)
    if (ranks[r].node != ranks[0].node) return concat("rank ", r, " is on another node than rank 0");
  if (ranks.size() > peer::max_ranks)
    return concat("the kernels of peer_cuda serve at most ", peer::max_ranks, " ranks");
  for (std::size_t r = 0; r < ranks.size(); ++r)
    if (ranks[r].unreachable_rank >= 0)
      return concat("rank ", r, "'s GPU does not reach the memory of rank ", ranks[r].unreachable_rank, "'s");
  return "";
}

/// Second exchange, made after the exchange of all locations.
struct Capabilities {
  int nccl_version = 0, unreachable_rank = -1;
};

/// Version of the usable NCCL; 0 if there is none. The reason is dropped: make_backend() reports it when
/// "nccl" is requested by name.
int usable_nccl_version() {
  try {
    return nccl::require_version(nccl::nccl_api());
  } catch (const Error&) {
    return 0;
  }
}

struct LocationAndNode {
  DeviceLocation location;
  char host_id[160] = {};
};

}  // namespace

BackendChoice choose_backend(Ranks ranks, bool deterministic) {
  if (ranks.size() == 1) return {"peer_cuda", "a rank alone"};
  const std::string no_nccl = reason_against_nccl(ranks, deterministic);
  if (no_nccl.empty()) return {"nccl", "every rank has a GPU of its own"};
  const std::string no_peers = reason_against_peer_cuda(ranks);
  if (no_peers.empty()) return {"peer_cuda", no_nccl};
  return {"native", concat(no_nccl, ", and ", no_peers)};
}

std::vector<DeviceRank> gather_device_ranks(Backend& host, int rank, int size, const CommOptions& options) {
  LocationAndNode mine{locate_device(options.device)};
  std::memcpy(mine.host_id, options.host_id.data(), std::min(options.host_id.size(), sizeof mine.host_id));
  const auto locations = all_gather_value(host, mine, size);
  std::vector<DeviceRank> ranks;
  for (const LocationAndNode& h : locations)
    ranks.push_back({.node = std::string(h.location.machine, sizeof h.location.machine) +
                             std::string(h.host_id, sizeof h.host_id),
                     .gpu_uuid = std::string(h.location.gpu_uuid, sizeof h.location.gpu_uuid)});
  if (size == 1) return ranks;
  Capabilities capabilities;
  if (!find_shared_gpu(ranks)) capabilities.nccl_version = usable_nccl_version();
  for (int r = size - 1; r >= 0; --r) {
    const auto i = static_cast<std::size_t>(r);
    if (ranks[i].node == ranks[static_cast<std::size_t>(rank)].node &&
        !can_access_peer(mine.location, locations[i].location))
      capabilities.unreachable_rank = r;
  }
  const auto all = all_gather_value(host, capabilities, size);
  for (std::size_t r = 0; r < all.size(); ++r)
    ranks[r].nccl_version = all[r].nccl_version, ranks[r].unreachable_rank = all[r].unreachable_rank;
  return ranks;
}

}  // namespace rz
