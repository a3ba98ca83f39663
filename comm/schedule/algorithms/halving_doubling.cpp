// Recursive halving and doubling: as little traffic as a ring in ceil(log2 n) rounds a phase. In round k of
// the halving, a rank sends the partial sums of half of the chunks that it still cares for to a rank further
// on, and adds what arrives to the other half; the doubling is the same backwards. Rabenseifner's algorithm
// (Thakur, Rabenseifner and Gropp, doi:10.1177/1094342005051521) pairs ranks by their bits and has to fold
// ranks beyond a power of two in first; here the partners stand on a circle as in Bruck et al.,
// doi:10.1109/71.642949, and Träff, doi:10.34726/10760, so that any size takes n-1 chunks each way.
//
// Chunks are counted from the rank itself: relative chunk i of rank r is the part of rank r + i. A round
// (near, far) concerns relative chunks [near, far): to the rank `near` places on they are its [0, far -
// near).

#include "comm/schedule/algorithms/ring_neighbours.h"

namespace rz {

namespace {

struct Round {
  int near, peer;
};

std::vector<Round> halvings(int size) {
  std::vector<Round> rounds;
  for (int far = size; far > 1; far = (far + 1) / 2) rounds.push_back({(far + 1) / 2, far});
  return rounds;
}

// `partial(relative chunk)` is where the sum of a chunk other than the own is kept.
template <class Partial>
void halve(RankContext seat, std::vector<Step>& steps, Partial partial) {
  std::vector<ChunkRef> held;
  held.reserve(static_cast<std::size_t>(seat.size));
  for (int i = 0; i < seat.size; ++i) held.push_back(input(rank_at_distance(seat, i)));
  for (const auto [near, far] : halvings(seat.size)) {
    for (int i = near; i < far; ++i) steps.push_back(send(rank_at_distance(seat, near), held[i]));
    for (int i = 0; i < far - near; ++i) {
      const ChunkRef sum = i == 0 ? output(seat.rank) : partial(i);
      steps.push_back(reduce_step(sum, {local(held[i]), from(rank_at_distance(seat, -near))}, near == 1));
      held[i] = sum;
    }
  }
  if (seat.size == 1) steps.push_back(reduce_step(output(0), {local(input(0))}, true));
}

// The own chunk, relative chunk 0, is in `own`; all others end in the output.
void all_gather_doubling(RankContext seat, ChunkRef own, std::vector<Step>& steps) {
  const auto rounds = halvings(seat.size);
  for (auto round = rounds.rbegin(); round != rounds.rend(); ++round) {
    const auto [near, far] = *round;
    for (int i = 0; i < far - near; ++i)
      steps.push_back(send(rank_at_distance(seat, -near), i == 0 ? own : output(rank_at_distance(seat, i))));
    for (int i = near; i < far; ++i)
      steps.push_back(recv(output(rank_at_distance(seat, i)), rank_at_distance(seat, near)));
  }
}

}  // namespace

Schedule halving_doubling_all_reduce(RankContext seat) {
  Schedule s{.chunks = seat.size};
  halve(seat, s.steps, [&](int i) { return output(rank_at_distance(seat, i)); });
  all_gather_doubling(seat, output(seat.rank), s.steps);
  return s;
}

Schedule halving_reduce_scatter(RankContext seat) {
  Schedule s{.chunks = seat.size, .scratch_chunks = seat.size > 3 ? seat.size / 2 - 1 : 0};
  halve(seat, s.steps, [&](int i) { return scratch(i - 1, rank_at_distance(seat, i)); });
  return s;
}

Schedule doubling_all_gather(RankContext seat) {
  Schedule s{.chunks = seat.size};
  s.steps.push_back(copy(output(seat.rank), input(seat.rank)));
  all_gather_doubling(seat, input(seat.rank), s.steps);
  return s;
}

}  // namespace rz
