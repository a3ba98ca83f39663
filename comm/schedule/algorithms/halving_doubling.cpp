// Recursive halving and doubling: the traffic of a ring in ceil(log2 n) rounds per phase. In each round of
// the halving, a rank sends the partial sums of half of its remaining chunks to another rank and adds the
// received partial sums to the other half. The doubling reverses the rounds. Rabenseifner's algorithm
// (Thakur, Rabenseifner and Gropp, doi:10.1177/1094342005051521) pairs ranks by their bits and has to merge
// ranks beyond a power of two first. Here partners are at cyclic distances, as in Bruck et al.,
// doi:10.1109/71.642949, and Träff, doi:10.34726/10760, so that every group size moves n-1 chunks each way.
//
// Chunks are numbered relative to the rank: relative chunk i of rank r is the shard of rank r + i. A round
// (near, far) sends relative chunks [near, far) to rank r + near, where their relative numbers are [0, far -
// near).

#include "comm/schedule/schedule.h"

namespace rz::schedule {

namespace {

struct Round {
  int near, peer;
};

std::vector<Round> halvings(int size) {
  std::vector<Round> rounds;
  for (int far = size; far > 1; far = (far + 1) / 2) rounds.push_back({(far + 1) / 2, far});
  return rounds;
}

// `partial(relative chunk)`: where the partial sum of a chunk other than the own is.
template <class Partial>
void halve(RankContext context, std::vector<Step>& steps, Partial partial) {
  std::vector<ChunkRef> held;  // by relative chunk; of the same regions on all ranks
  held.reserve(static_cast<std::size_t>(context.size));
  for (int i = 0; i < context.size; ++i) held.push_back(input(rank_at_distance(context, i)));
  for (const auto [near, far] : halvings(context.size)) {
    for (int i = near; i < far; ++i) steps.push_back(send(rank_at_distance(context, near), held[i]));
    for (int i = 0; i < far - near; ++i) {
      const ChunkRef sum = i == 0 ? output(context.rank) : partial(i);
      const Operand received = from(rank_at_distance(context, -near), held[near + i].region != Region::input);
      steps.push_back(reduce_step(sum, {local(held[i]), received}, near == 1));
      held[i] = sum;
    }
  }
  if (context.size == 1) steps.push_back(reduce_step(output(0), {local(input(0))}, true));
}

// `own`: relative chunk 0, the own one. All others are received into the output.
void all_gather_doubling(RankContext context, ChunkRef own, std::vector<Step>& steps) {
  const auto rounds = halvings(context.size);
  for (auto round = rounds.rbegin(); round != rounds.rend(); ++round) {
    const auto [near, far] = *round;
    for (int i = 0; i < far - near; ++i)
      steps.push_back(
          send(rank_at_distance(context, -near), i == 0 ? own : output(rank_at_distance(context, i))));
    for (int i = near; i < far; ++i)
      steps.push_back(recv(output(rank_at_distance(context, i)), rank_at_distance(context, near)));
  }
}

}  // namespace

Schedule halving_doubling_all_reduce(RankContext context) {
  Schedule s{.chunks = context.size};
  halve(context, s.steps, [&](int i) { return output(rank_at_distance(context, i)); });
  all_gather_doubling(context, output(context.rank), s.steps);
  return s;
}

Schedule halving_reduce_scatter(RankContext context) {
  Schedule s{.chunks = context.size, .scratch_cells = context.size > 3 ? context.size / 2 - 1 : 0};
  halve(context, s.steps, [&](int i) { return scratch(i - 1, rank_at_distance(context, i)); });
  return s;
}

Schedule doubling_all_gather(RankContext context) {
  Schedule s{.chunks = context.size};
  s.steps.push_back(copy(output(context.rank), input(context.rank)));
  all_gather_doubling(context, input(context.rank), s.steps);
  return s;
}

}  // namespace rz::schedule
