#include "comm/shared_memory/staging_ring.h"

#include <algorithm>

namespace rz {

namespace {

constexpr std::size_t page = 64 << 10;  // the largest common page size
constexpr std::size_t min_staging_bytes = 1 << 20;
constexpr std::size_t l2_multiple = 2, l3_share_divisor = 4;

}  // namespace

std::size_t staging_ring_bytes(const Caches& caches, std::size_t ranks) {
  const std::size_t sharers =
      std::clamp<std::size_t>(ranks, 1, static_cast<std::size_t>(caches.l3_processors));
  const std::size_t limit = caches.l3 / sharers / l3_share_divisor;
  return std::max(std::min(l2_multiple * caches.l2, limit) / page * page, min_staging_bytes);
}

}  // namespace rz
