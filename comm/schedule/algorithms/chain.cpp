// Chain all-reduce: the sum runs 0 → 1 → … → n-1, each rank adding its own, and the result runs back. Sums
// are in rank order, each rank talks to its two neighbours only, and slices of the one chunk follow each
// other down the chain, so that a large buffer costs two transfers of it and n-1 slices of latency each way.
// 16- and 8-bit floats are rounded at every rank on the way, where one_shot and two_shot round once: the bits
// do not depend on how a buffer is cut, but differ from theirs.

#include "comm/schedule/algorithms/ring_neighbours.h"

namespace rz {

Schedule chain_all_reduce(RankContext seat) {
  const bool first = seat.rank == 0, last = seat.rank == seat.size - 1;
  Schedule s;
  if (first && last) s.steps.push_back(reduce_step(output(0), {local(input(0))}, true));
  if (!first) s.steps.push_back(reduce_step(output(0), {from(seat.rank - 1), local(input(0))}, last));
  if (!last) s.steps.push_back(send(seat.rank + 1, first ? input(0) : output(0)));
  if (!last) s.steps.push_back(recv(output(0), seat.rank + 1));
  if (!first) s.steps.push_back(send(seat.rank - 1, output(0)));
  return s;
}

}  // namespace rz
