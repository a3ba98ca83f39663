// Direct: one message between any two ranks that have something for each other, one round. Best where every
// pair of ranks has a link of its own, and for small groups. Peers are visited from the next rank on, so that
// nobody is swamped. (The direct reduce_scatter is half of two_shot and stands there.)

#include "comm/schedule/algorithms/ring_neighbours.h"

namespace rz {

Schedule linear_all_gather(RankContext seat) {
  Schedule s{.chunks = seat.size};
  s.steps.push_back(copy(output(seat.rank), input(seat.rank)));
  for (int d = 1; d < seat.size; ++d) s.steps.push_back(send(rank_at_distance(seat, d), input(seat.rank)));
  for (int d = 1; d < seat.size; ++d)
    s.steps.push_back(recv(output(rank_at_distance(seat, -d)), rank_at_distance(seat, -d)));
  return s;
}

Schedule linear_broadcast(RankContext seat) {
  if (seat.rank != seat.root) return {.steps = {recv(output(0), seat.root)}};
  Schedule s{.steps = {copy(output(0), input(0))}};
  for (int d = 1; d < seat.size; ++d) s.steps.push_back(send(rank_at_distance(seat, d), input(0)));
  return s;
}

Schedule linear_reduce(RankContext seat) {
  if (seat.rank != seat.root) return {.steps = {send(seat.root, input(0))}};
  return {.steps = {reduce_step(output(0), rank_ordered_operands(seat, input(0)), true)}};
}

Schedule linear_gather(RankContext seat) {
  if (seat.rank != seat.root) return {.chunks = seat.size, .steps = {send(seat.root, input(seat.rank))}};
  Schedule s{.chunks = seat.size, .steps = {copy(output(seat.rank), input(seat.rank))}};
  for (int d = 1; d < seat.size; ++d)
    s.steps.push_back(recv(output(rank_at_distance(seat, d)), rank_at_distance(seat, d)));
  return s;
}

Schedule linear_scatter(RankContext seat) {
  if (seat.rank != seat.root) return {.chunks = seat.size, .steps = {recv(output(seat.rank), seat.root)}};
  Schedule s{.chunks = seat.size, .steps = {copy(output(seat.rank), input(seat.rank))}};
  for (int d = 1; d < seat.size; ++d)
    s.steps.push_back(send(rank_at_distance(seat, d), input(rank_at_distance(seat, d))));
  return s;
}

}  // namespace rz
