// Reduce and broadcast: the root takes everybody's contribution, sums in rank order and sends the sum to all.
// Two rounds and 2(n-1) messages instead of the n(n-1) of one_shot, for small buffers of hosts that share
// processors or wires, where the number of messages counts; the root has all the work.

#include "comm/algorithms/peers.h"

namespace rz {

Schedule reduce_broadcast_all_reduce(Seat seat) {
  if (seat.rank != seat.root) return {.steps = {send(seat.root, input(0)), recv(output(0), seat.root)}};
  Schedule s{.steps = {combine(output(0), in_rank_order(seat, input(0)), true)}};
  for (int d = 1; d < seat.size; ++d) s.steps.push_back(send(around(seat, d), output(0)));
  return s;
}

}  // namespace rz
