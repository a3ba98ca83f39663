// Chain all-reduce: the sum moves 0 → 1 → … → n-1, each rank adds its contribution, and the result moves
// back. Sums are in rank order, each rank has two neighbours only, and slices of the one chunk are pipelined
// down the chain, so that a large buffer costs two transfers of it and the latency of n-1 slices each way.
// 16- and 8-bit floats are rounded at every rank, where one_shot and two_shot round once: the bits do not
// depend on chunk sizes, but differ from theirs.

#include "comm/schedule/schedule.h"

namespace rz::schedule {

Schedule chain_all_reduce(RankContext context) {
  const bool first = context.rank == 0, last = context.rank == context.size - 1;
  Schedule s;
  if (first && last) s.steps.push_back(reduce_step(output(0), {local(input(0))}, true));
  if (!first)
    s.steps.push_back(
        reduce_step(output(0), {from(context.rank - 1, context.rank > 1), local(input(0))}, last));
  if (!last) s.steps.push_back(send(context.rank + 1, first ? input(0) : output(0)));
  if (!last) s.steps.push_back(recv(output(0), context.rank + 1));
  if (!first) s.steps.push_back(send(context.rank - 1, output(0)));
  return s;
}

}  // namespace rz::schedule
