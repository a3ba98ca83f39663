#include "comm/transports/staging_ring.h"

#include <algorithm>

namespace rz {

namespace {

constexpr std::size_t page = 64 << 10;  // the largest usual one
constexpr std::size_t min_bytes = 1 << 20;
constexpr std::size_t times_l2 = 2, parts_of_l3_share = 4;

}  // namespace

std::size_t staging_ring_bytes(const Caches& caches, std::size_t ranks) {
  const std::size_t sharers =
      std::clamp<std::size_t>(ranks, 1, static_cast<std::size_t>(caches.l3_processors));
  const std::size_t limit = caches.l3 / sharers / parts_of_l3_share;
  return std::max(std::min(times_l2 * caches.l2, limit) / page * page, min_bytes);
}

}  // namespace rz
