// One-shot all-reduce: every rank sends its buffer to every other and reduces all buffers in rank order. One
// round, each rank sends n-1 buffers; for small buffers. Each rank must start from rank 0's data, not from
// its own, or results would differ in the last bit.
//
// The sum is made in scratch: in place, it would overwrite a contribution that peers have not received yet,
// and all ranks would deadlock.

#include "comm/schedule/schedule.h"

namespace rz::schedule {

Schedule one_shot_all_reduce(RankContext context) {
  if (context.size == 1) return {.steps = {reduce_step(output(0), {local(input(0))}, true)}};
  Schedule s{.scratch_cells = 1};
  for (int d = 1; d < context.size; ++d) s.steps.push_back(send(rank_at_distance(context, d), input(0)));
  s.steps.push_back(
      reduce_step(scratch(0, 0), rank_ordered_operands(context, input(0)), true, context.order));
  s.steps.push_back(copy(output(0), scratch(0, 0)));
  return s;
}

}  // namespace rz::schedule
