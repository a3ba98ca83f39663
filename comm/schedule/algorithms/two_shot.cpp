// Two-shot: rank r fetches everybody's chunk r, sums it in rank order, and hands out the result: two rounds
// and the least traffic, for all but small buffers wherever every pair of ranks has a link of its own (shared
// memory, or a switch). Peers are visited from the next rank on, so that nobody is swamped.

#include "comm/schedule/algorithms/ring_neighbours.h"

namespace rz {

namespace {

void reduce_own_chunk(RankContext seat, ChunkRef sum, std::vector<Step>& steps) {
  for (int d = 1; d < seat.size; ++d)
    steps.push_back(send(rank_at_distance(seat, d), input(rank_at_distance(seat, d))));
  steps.push_back(reduce_step(sum, rank_ordered_operands(seat, input(seat.rank)), true));
}

}  // namespace

Schedule two_shot_all_reduce(RankContext seat) {
  Schedule s{.chunks = seat.size};
  reduce_own_chunk(seat, output(seat.rank), s.steps);
  for (int d = 1; d < seat.size; ++d) s.steps.push_back(send(rank_at_distance(seat, d), output(seat.rank)));
  for (int d = 1; d < seat.size; ++d)
    s.steps.push_back(recv(output(rank_at_distance(seat, -d)), rank_at_distance(seat, -d)));
  return s;
}

Schedule linear_reduce_scatter(RankContext seat) {
  Schedule s{.chunks = seat.size};
  reduce_own_chunk(seat, output(seat.rank), s.steps);
  return s;
}

// The root alone collects the results.
Schedule two_shot_reduce(RankContext seat) {
  const bool root = seat.rank == seat.root;
  Schedule s{.chunks = seat.size, .scratch_chunks = root ? 0 : 1};
  const ChunkRef sum = root ? output(seat.rank) : scratch(0, seat.rank);
  reduce_own_chunk(seat, sum, s.steps);
  if (!root) s.steps.push_back(send(seat.root, sum));
  for (int d = 1; root && d < seat.size; ++d)
    s.steps.push_back(recv(output(rank_at_distance(seat, -d)), rank_at_distance(seat, -d)));
  return s;
}

}  // namespace rz
