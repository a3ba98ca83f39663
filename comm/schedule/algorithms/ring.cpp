// Ring: every rank has two neighbours only, and each link carries (n-1)/n of the buffer per phase, the
// minimum. Chunk c is summed along c+1 → c+2 → … → c, so it is complete on rank c; then the results move
// around the ring once more. n-1 rounds per phase, so it is for large buffers. Patarasuk and Yuan, "Bandwidth
// optimal all-reduce algorithms for clusters of workstations", doi:10.1016/j.jpdc.2008.09.002.

#include "comm/schedule/schedule.h"

namespace rz::schedule {

namespace {

// Each rank sends its own chunk first, then the chunk that it received in the previous round.
void all_gather_around_ring(RankContext context, ChunkRef own, std::vector<Step>& steps) {
  for (int round = 0; round < context.size - 1; ++round) {
    steps.push_back(
        send(rank_at_distance(context, 1), round == 0 ? own : output(rank_at_distance(context, -round))));
    steps.push_back(recv(output(rank_at_distance(context, -round - 1)), rank_at_distance(context, -1)));
  }
}

// `partial(round, chunk)`: where the sum of a round is until it is sent.
template <class Partial>
void reduce_around_ring(RankContext context, std::vector<Step>& steps, Partial partial) {
  ChunkRef carried = input(rank_at_distance(context, -1));
  for (int round = 1; round < context.size; ++round) {
    const int chunk = rank_at_distance(context, -1 - round);
    const bool last = round == context.size - 1;
    const ChunkRef sum = last ? output(chunk) : partial(round, chunk);
    steps.push_back(send(rank_at_distance(context, 1), carried));
    const Operand received = from(rank_at_distance(context, -1), round > 1);
    steps.push_back(reduce_step(sum, {received, local(input(chunk))}, last));
    carried = sum;
  }
  if (context.size == 1) steps.push_back(reduce_step(output(0), {local(input(0))}, true));
}

}  // namespace

Schedule ring_all_reduce(RankContext context) {
  Schedule s{.chunks = context.size};
  reduce_around_ring(context, s.steps, [](int, int chunk) { return output(chunk); });
  all_gather_around_ring(context, output(context.rank), s.steps);
  return s;
}

// The output holds the own chunk only, so partial sums use scratch: two cells alternately, since with one
// cell every rank would wait for its successor to receive a sum before it could compute the next.
Schedule ring_reduce_scatter(RankContext context) {
  Schedule s{.chunks = context.size, .scratch_cells = context.size > 2 ? 2 : 0};
  reduce_around_ring(context, s.steps, [](int round, int chunk) { return scratch(round % 2, chunk); });
  return s;
}

Schedule ring_all_gather(RankContext context) {
  Schedule s{.chunks = context.size};
  s.steps.push_back(copy(output(context.rank), input(context.rank)));
  all_gather_around_ring(context, input(context.rank), s.steps);
  return s;
}

}  // namespace rz::schedule
