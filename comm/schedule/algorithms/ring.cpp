// Ring: every rank talks to its two neighbours only, and each link carries (n-1)/n of the buffer a phase, the
// least possible. Chunk c is summed along c+1 → c+2 → … → c, so it is complete on rank c; then the results go
// around once more. Many rounds (n-1 a phase), so it is for large buffers. Patarasuk and Yuan, "Bandwidth
// optimal all-reduce algorithms for clusters of workstations", doi:10.1016/j.jpdc.2008.09.002.

#include "comm/schedule/algorithms/ring_neighbours.h"

namespace rz {

namespace {

// Each rank owns its chunk and passes on what it got in the round before.
void all_gather_around_ring(RankContext seat, ChunkRef own, std::vector<Step>& steps) {
  for (int round = 0; round < seat.size - 1; ++round) {
    steps.push_back(
        send(rank_at_distance(seat, 1), round == 0 ? own : output(rank_at_distance(seat, -round))));
    steps.push_back(recv(output(rank_at_distance(seat, -round - 1)), rank_at_distance(seat, -1)));
  }
}

// `partial(round, chunk)` is where the sum of a round is kept until it is sent.
template <class Partial>
void reduce_around_ring(RankContext seat, std::vector<Step>& steps, Partial partial) {
  ChunkRef carried = input(rank_at_distance(seat, -1));
  for (int round = 1; round < seat.size; ++round) {
    const int chunk = rank_at_distance(seat, -1 - round);
    const bool last = round == seat.size - 1;
    const ChunkRef sum = last ? output(chunk) : partial(round, chunk);
    steps.push_back(send(rank_at_distance(seat, 1), carried));
    steps.push_back(reduce_step(sum, {from(rank_at_distance(seat, -1)), local(input(chunk))}, last));
    carried = sum;
  }
  if (seat.size == 1) steps.push_back(reduce_step(output(0), {local(input(0))}, true));
}

}  // namespace

Schedule ring_all_reduce(RankContext seat) {
  Schedule s{.chunks = seat.size};
  reduce_around_ring(seat, s.steps, [](int, int chunk) { return output(chunk); });
  all_gather_around_ring(seat, output(seat.rank), s.steps);
  return s;
}

// A rank's output has room for its own chunk only, so partial sums pass through scratch: two cells in turn,
// since with one every rank would wait for its successor to have taken the sum before it could make room for
// the next.
Schedule ring_reduce_scatter(RankContext seat) {
  Schedule s{.chunks = seat.size, .scratch_chunks = seat.size > 2 ? 2 : 0};
  reduce_around_ring(seat, s.steps, [](int round, int chunk) { return scratch(round % 2, chunk); });
  return s;
}

Schedule ring_all_gather(RankContext seat) {
  Schedule s{.chunks = seat.size};
  s.steps.push_back(copy(output(seat.rank), input(seat.rank)));
  all_gather_around_ring(seat, input(seat.rank), s.steps);
  return s;
}

}  // namespace rz
