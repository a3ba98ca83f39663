#pragma once
/// What the schedules of this folder share: who comes next around a group, and sums in rank order.

#include "comm/schedule/schedule.h"

namespace rz {

/// The rank `distance` (any sign, less than the size) further around the group.
inline int rank_at_distance(RankContext seat, int distance) {
  return (seat.rank + distance + seat.size) % seat.size;
}

/// The terms x0, x1, …, x(n-1): the next message of every other rank, and `mine` in this rank's place.
inline std::vector<Operand> rank_ordered_operands(RankContext seat, ChunkRef mine) {
  std::vector<Operand> terms;
  terms.reserve(static_cast<std::size_t>(seat.size));
  for (int r = 0; r < seat.size; ++r) terms.push_back(r == seat.rank ? local(mine) : from(r));
  return terms;
}

}  // namespace rz
