// Direct: one message between any two ranks that have something for each other, one round. Best where every
// pair of ranks has a link of its own, and for small groups. Peers are visited from the next rank on, so that
// nobody is swamped. (The direct reduce_scatter is half of two_shot and stands there.)

#include "comm/algorithms/peers.h"

namespace rz {

Schedule direct_all_gather(Seat seat) {
  Schedule s{.chunks = seat.size};
  s.steps.push_back(copy(output(seat.rank), input(seat.rank)));
  for (int d = 1; d < seat.size; ++d) s.steps.push_back(send(around(seat, d), input(seat.rank)));
  for (int d = 1; d < seat.size; ++d) s.steps.push_back(recv(output(around(seat, -d)), around(seat, -d)));
  return s;
}

Schedule direct_broadcast(Seat seat) {
  if (seat.rank != seat.root) return {.steps = {recv(output(0), seat.root)}};
  Schedule s{.steps = {copy(output(0), input(0))}};
  for (int d = 1; d < seat.size; ++d) s.steps.push_back(send(around(seat, d), input(0)));
  return s;
}

Schedule direct_reduce(Seat seat) {
  if (seat.rank != seat.root) return {.steps = {send(seat.root, input(0))}};
  return {.steps = {combine(output(0), in_rank_order(seat, input(0)), true)}};
}

Schedule direct_gather(Seat seat) {
  if (seat.rank != seat.root) return {.chunks = seat.size, .steps = {send(seat.root, input(seat.rank))}};
  Schedule s{.chunks = seat.size, .steps = {copy(output(seat.rank), input(seat.rank))}};
  for (int d = 1; d < seat.size; ++d) s.steps.push_back(recv(output(around(seat, d)), around(seat, d)));
  return s;
}

Schedule direct_scatter(Seat seat) {
  if (seat.rank != seat.root) return {.chunks = seat.size, .steps = {recv(output(seat.rank), seat.root)}};
  Schedule s{.chunks = seat.size, .steps = {copy(output(seat.rank), input(seat.rank))}};
  for (int d = 1; d < seat.size; ++d) s.steps.push_back(send(around(seat, d), input(around(seat, d))));
  return s;
}

}  // namespace rz
