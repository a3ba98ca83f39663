// Dissemination barrier: in round k a rank tells the one 2^k places on of everybody it has heard of, itself
// included; after ceil(log2 n) rounds everybody has heard of everybody. Hensgen, Finkel and Manber, "Two
// algorithms for barrier synchronization", doi:10.1007/BF01379320.

#include "comm/schedule/algorithms/ring_neighbours.h"

namespace rz {

// What a rank has heard by round k is cell k: combining the last cell with the message, rather than just
// receiving it, makes the next round wait for both.
Schedule dissemination_barrier(RankContext seat) {
  Schedule s{.scratch_chunks = 1};
  for (int distance = 1; distance < seat.size; distance *= 2, ++s.scratch_chunks) {
    const int heard = s.scratch_chunks - 1;
    s.steps.push_back(send(rank_at_distance(seat, distance), scratch(heard, 0)));
    s.steps.push_back(reduce_step(scratch(heard + 1, 0),
                                  {local(scratch(heard, 0)), from(rank_at_distance(seat, -distance))}));
  }
  return s;
}

}  // namespace rz
