// Two-shot: rank r receives chunk r of every rank, reduces all at once, and sends the result to all. Two
// rounds and minimal traffic; for all but small buffers where every pair of ranks has a link of its own
// (shared memory, or a switch). Each rank visits its peers from the next rank on, which spreads the load over
// receivers.

#include "comm/schedule/schedule.h"

namespace rz::schedule {

namespace {

void reduce_own_chunk(RankContext context, ChunkRef sum, std::vector<Step>& steps) {
  for (int d = 1; d < context.size; ++d)
    steps.push_back(send(rank_at_distance(context, d), input(rank_at_distance(context, d))));
  steps.push_back(reduce_step(sum, rank_ordered_operands(context, input(context.rank)), true, context.order));
}

}  // namespace

Schedule two_shot_all_reduce(RankContext context) {
  Schedule s{.chunks = context.size};
  reduce_own_chunk(context, output(context.rank), s.steps);
  for (int d = 1; d < context.size; ++d)
    s.steps.push_back(send(rank_at_distance(context, d), output(context.rank)));
  for (int d = 1; d < context.size; ++d)
    s.steps.push_back(recv(output(rank_at_distance(context, -d)), rank_at_distance(context, -d)));
  return s;
}

Schedule linear_reduce_scatter(RankContext context) {
  Schedule s{.chunks = context.size};
  reduce_own_chunk(context, output(context.rank), s.steps);
  return s;
}

// Only the root receives the results.
Schedule two_shot_reduce(RankContext context) {
  const bool root = context.rank == context.root;
  Schedule s{.chunks = context.size, .scratch_cells = root ? 0 : 1};
  const ChunkRef sum = root ? output(context.rank) : scratch(0, context.rank);
  reduce_own_chunk(context, sum, s.steps);
  if (!root) s.steps.push_back(send(context.root, sum));
  for (int d = 1; root && d < context.size; ++d)
    s.steps.push_back(recv(output(rank_at_distance(context, -d)), rank_at_distance(context, -d)));
  return s;
}

}  // namespace rz::schedule
