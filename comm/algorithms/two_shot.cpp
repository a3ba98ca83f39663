// Two-shot: rank r fetches everybody's chunk r, sums it in rank order, and hands out the result: two rounds
// and the least traffic, for all but small buffers wherever every pair of ranks has a link of its own (shared
// memory, or a switch). Peers are visited from the next rank on, so that nobody is swamped.

#include "comm/algorithms/peers.h"

namespace rz {

namespace {

void sum_own_chunk(Seat seat, Slot sum, std::vector<Step>& steps) {
  for (int d = 1; d < seat.size; ++d) steps.push_back(send(around(seat, d), input(around(seat, d))));
  steps.push_back(combine(sum, in_rank_order(seat, input(seat.rank)), true));
}

}  // namespace

Schedule two_shot_all_reduce(Seat seat) {
  Schedule s{.chunks = seat.size};
  sum_own_chunk(seat, output(seat.rank), s.steps);
  for (int d = 1; d < seat.size; ++d) s.steps.push_back(send(around(seat, d), output(seat.rank)));
  for (int d = 1; d < seat.size; ++d) s.steps.push_back(recv(output(around(seat, -d)), around(seat, -d)));
  return s;
}

Schedule direct_reduce_scatter(Seat seat) {
  Schedule s{.chunks = seat.size};
  sum_own_chunk(seat, output(seat.rank), s.steps);
  return s;
}

// The root alone collects the results.
Schedule two_shot_reduce(Seat seat) {
  const bool root = seat.rank == seat.root;
  Schedule s{.chunks = seat.size, .cells = root ? 0 : 1};
  const Slot sum = root ? output(seat.rank) : scratch(0, seat.rank);
  sum_own_chunk(seat, sum, s.steps);
  if (!root) s.steps.push_back(send(seat.root, sum));
  for (int d = 1; root && d < seat.size; ++d)
    s.steps.push_back(recv(output(around(seat, -d)), around(seat, -d)));
  return s;
}

}  // namespace rz
