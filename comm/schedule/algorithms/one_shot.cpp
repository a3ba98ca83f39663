// One-shot all-reduce: everybody sends everything to everybody, and everybody sums it all in rank order: one
// round, (n-1) times the traffic of one buffer, for small buffers. Each rank must start from rank 0's data
// and not from its own, or ranks would disagree in the last bit.
//
// The sum is made in scratch: in place, it would overwrite a contribution that peers have yet to take, and
// they would wait for each other's sums for ever.

#include "comm/schedule/algorithms/ring_neighbours.h"

namespace rz {

Schedule one_shot_all_reduce(RankContext seat) {
  if (seat.size == 1) return {.steps = {reduce_step(output(0), {local(input(0))}, true)}};
  Schedule s{.scratch_chunks = 1};
  for (int d = 1; d < seat.size; ++d) s.steps.push_back(send(rank_at_distance(seat, d), input(0)));
  s.steps.push_back(reduce_step(scratch(0, 0), rank_ordered_operands(seat, input(0)), true));
  s.steps.push_back(copy(output(0), scratch(0, 0)));
  return s;
}

}  // namespace rz
