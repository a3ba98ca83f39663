// Pairwise all-to-all: in round t a rank sends to the rank t places on and receives from the one t places
// back, so that every rank is visited by one peer at a time.

#include "comm/schedule/algorithms/ring_neighbours.h"

namespace rz {

Schedule pairwise_all_to_all(RankContext seat) {
  const auto chunk = [&](int source, int target) { return source * seat.size + target; };
  const int self = chunk(seat.rank, seat.rank);
  Schedule s{.chunks = seat.size * seat.size, .steps = {copy(output(self), input(self))}};
  for (int t = 1; t < seat.size; ++t) {
    const int target = rank_at_distance(seat, t), source = rank_at_distance(seat, -t);
    s.steps.push_back(send(target, input(chunk(seat.rank, target))));
    s.steps.push_back(recv(output(chunk(source, seat.rank)), source));
  }
  return s;
}

Schedule pairwise_all_to_all_v(RankContext seat) { return pairwise_all_to_all(seat); }

}  // namespace rz
