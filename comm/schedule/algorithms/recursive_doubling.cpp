// Recursive doubling: ceil(log2 n) rounds, half as many as a tree's, for small all-reduces over many ranks.
// In each round the two halves of a block of the reduction tree (reduction_tree.h) exchange their sums, at
// distance 1 first, so every rank computes the whole tree. Beyond a power of two, a rank of the shorter half
// sends to several of the other. Thakur, Rabenseifner and Gropp, doi:10.1177/1094342005051521.
//
// Each round's sum has a scratch cell of its own: a peer may still receive the last one.

#include <algorithm>

#include "comm/schedule/schedule.h"

namespace rz::schedule {

namespace {

/// The two halves of a block, and the exchange between them as one rank sees it.
void exchange(RankContext context, int half, ChunkRef held, ChunkRef sum, std::vector<Step>& steps) {
  const int left = context.rank / (2 * half) * (2 * half), right = left + half;
  const int others = std::min(half, context.size - right);  // ranks of the right half
  const bool is_left = context.rank < right;
  const int index = context.rank - (is_left ? left : right);
  if (is_left && index < others) steps.push_back(send(right + index, held));
  for (int i = index; !is_left && i < half; i += others) steps.push_back(send(left + i, held));
  const int peer = is_left ? right + index % others : left + index;
  const int ranks = is_left ? others : half;  // whose sum the peer has
  std::vector<Operand> operands{local(held), from(peer, ranks > 1)};
  if (!is_left) std::swap(operands[0], operands[1]);
  steps.push_back(reduce_step(sum, std::move(operands), 2 * half >= context.size));
}

}  // namespace

Schedule recursive_doubling_all_reduce(RankContext context) {
  if (context.size == 1) return {.steps = {reduce_step(output(0), {local(input(0))}, true)}};
  Schedule s;
  ChunkRef held = input(0);
  for (int half = 1; half < context.size; half *= 2) {
    if (((context.rank / half) ^ 1) * half >= context.size) continue;  // without a partner
    const ChunkRef sum = scratch(s.scratch_cells++, 0);
    exchange(context, half, held, sum, s.steps);
    held = sum;
  }
  s.steps.push_back(copy(output(0), held));
  return s;
}

}  // namespace rz::schedule
