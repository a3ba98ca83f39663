// Dissemination barrier: in round k rank r signals rank r + 2^k that it and all ranks that have signalled it,
// directly or not, have arrived. After ceil(log2 n) rounds every rank has a signal of every other. Hensgen,
// Finkel and Manber, "Two algorithms for barrier synchronization", doi:10.1007/BF01379320.

#include "comm/schedule/schedule.h"

namespace rz::schedule {

// Cell k stands for all signals up to round k. Reducing the last cell with the message, instead of receiving
// the message only, makes the next round depend on both.
Schedule dissemination_barrier(RankContext context) {
  Schedule s{.scratch_cells = 1};
  for (int distance = 1; distance < context.size; distance *= 2, ++s.scratch_cells) {
    const int last = s.scratch_cells - 1;
    s.steps.push_back(send(rank_at_distance(context, distance), scratch(last, 0)));
    s.steps.push_back(reduce_step(scratch(last + 1, 0),
                                  {local(scratch(last, 0)), from(rank_at_distance(context, -distance))}));
  }
  return s;
}

}  // namespace rz::schedule
