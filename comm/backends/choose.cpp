#include "comm/backends/choose.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "comm/backends/homes.h"
#include "comm/backends/nccl/api.h"
#include "comm/core/error.h"
#include "comm/kernels/peer_kernels.h"

namespace rz {

namespace {

using Ranks = std::span<const RankOnDevice>;

/// The first two ranks on one card, in the order of the second.
std::optional<std::pair<std::size_t, std::size_t>> sharing(Ranks ranks) {
  for (std::size_t b = 1; b < ranks.size(); ++b)
    for (std::size_t a = 0; a < b; ++a)
      if (ranks[a].card == ranks[b].card) return std::pair{a, b};
  return std::nullopt;
}

/// Empty if NCCL can serve the group. In an order that first names what no installation mends.
std::string against_nccl(Ranks ranks, bool deterministic) {
  if (const auto pair = sharing(ranks))
    return str("ranks ", pair->first, " and ", pair->second, " share a GPU");
  if (deterministic && ranks.size() > PeerKernels::most_sources)
    return str("sums in rank order over NCCL serve at most ", PeerKernels::most_sources, " ranks");
  for (std::size_t r = 0; r < ranks.size(); ++r)
    if (ranks[r].nccl == 0) return str("rank ", r, " has no NCCL that serves");
  for (std::size_t r = 1; r < ranks.size(); ++r)
    if (ranks[r].nccl != ranks[0].nccl)
      return str("rank 0 has NCCL ", nccl::version_text(ranks[0].nccl), " and rank ", r, " ",
                 nccl::version_text(ranks[r].nccl));
  return "";
}

std::string against_peer_cuda(Ranks ranks) {
  for (std::size_t r = 1; r < ranks.size(); ++r)
    if (ranks[r].host != ranks[0].host) return str("rank ", r, " is on another host than rank 0");
  if (ranks.size() > peer::most_ranks)
    return str("the kernels of peer_cuda serve at most ", peer::most_ranks, " ranks");
  for (std::size_t r = 0; r < ranks.size(); ++r)
    if (ranks[r].out_of_reach >= 0)
      return str("rank ", r, "'s GPU does not reach the memory of rank ", ranks[r].out_of_reach, "'s");
  return "";
}

/// What ranks say once they know where all are.
struct Means {
  int nccl = 0, out_of_reach = -1;
};

/// Why it does not serve is for who asks for it by name.
int version_of_nccl() {
  try {
    return nccl::require_version(nccl::nccl_api());
  } catch (const Error&) {
    return 0;
  }
}

struct HomeAndHost {
  Home home;
  char host_id[160] = {};
};

}  // namespace

BackendChoice choose_backend(Ranks ranks, bool deterministic) {
  if (ranks.size() == 1) return {"peer_cuda", "a rank alone"};
  const std::string no_nccl = against_nccl(ranks, deterministic);
  if (no_nccl.empty()) return {"nccl", "every rank has a GPU of its own"};
  const std::string no_peers = against_peer_cuda(ranks);
  if (no_peers.empty()) return {"peer_cuda", no_nccl};
  return {"ring", str(no_nccl, ", and ", no_peers)};
}

std::vector<RankOnDevice> ranks_on_devices(Backend& host, int rank, int size, const CommOptions& options) {
  HomeAndHost mine{home_of(options.device)};
  std::memcpy(mine.host_id, options.host_id.data(), std::min(options.host_id.size(), sizeof mine.host_id));
  const auto homes = tell_all(host, mine, size);
  std::vector<RankOnDevice> ranks;
  for (const HomeAndHost& h : homes)
    ranks.push_back({.host = std::string(h.home.machine, sizeof h.home.machine) +
                             std::string(h.host_id, sizeof h.host_id),
                     .card = std::string(h.home.card, sizeof h.home.card)});
  if (size == 1) return ranks;
  Means means;
  if (!sharing(ranks)) means.nccl = version_of_nccl();
  for (int r = size - 1; r >= 0; --r) {
    const auto i = static_cast<std::size_t>(r);
    if (ranks[i].host == ranks[static_cast<std::size_t>(rank)].host && !reaches(mine.home, homes[i].home))
      means.out_of_reach = r;
  }
  const auto all = tell_all(host, means, size);
  for (std::size_t r = 0; r < all.size(); ++r)
    ranks[r].nccl = all[r].nccl, ranks[r].out_of_reach = all[r].out_of_reach;
  return ranks;
}

}  // namespace rz
