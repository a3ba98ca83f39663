#pragma once
/// Helpers of the schedules in this folder: neighbours on a ring, and operands in rank order.

#include "comm/schedule/schedule.h"

namespace rz::schedule {

/// The rank at `distance` (of either sign, less than the size) from this one, cyclically.
inline int rank_at_distance(RankContext context, int distance) {
  return (context.rank + distance + context.size) % context.size;
}

/// The operands x0, x1, …, x(n-1): the next message of every peer, and `mine` in this rank's place.
inline std::vector<Operand> rank_ordered_operands(RankContext context, ChunkRef mine) {
  std::vector<Operand> operands;
  operands.reserve(static_cast<std::size_t>(context.size));
  for (int r = 0; r < context.size; ++r) operands.push_back(r == context.rank ? local(mine) : from(r));
  return operands;
}

}  // namespace rz::schedule
