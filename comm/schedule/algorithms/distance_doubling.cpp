// Recursive halving with distance doubling: the pairwise order with the traffic of a ring. Each chunk has a
// reduction tree of its own (reduction_tree.h), which ends at the chunk's rank, so in a group of 2^k ranks a
// rank exchanges half of its remaining chunks at each level: first with its neighbour, at the end across half
// of the group. Where nodes hold aligned blocks of ranks, the first levels stay within them, and a node sends
// (H - 1) / H of the buffer for H nodes. An all_reduce returns the results along the same trees.
//
// Vector halving and distance doubling are Rabenseifner's terms (doi:10.1007/978-3-540-24685-5_1), whose
// algorithm merges ranks beyond a power of two first. Here these are trees with missing leaves.

#include <bit>

#include "comm/schedule/algorithms/reduction_tree.h"

namespace rz::schedule {

namespace {

/// `sum_of(chunk)`: where this rank keeps the sum of a chunk.
template <class SumOf>
void reduce_by_trees(RankContext context, std::vector<Step>& steps, SumOf sum_of) {
  std::vector<ChunkRef> held;
  for (int c = 0; c < context.size; ++c) held.push_back(input(c));
  for (int half = 1; half < context.size; half *= 2) {
    for (int c = 0; c < context.size; ++c)
      if (const Merge m = merge_at(context, c, half); m.kind == Merge::sends)
        steps.push_back(send(m.peer, held[c]));
    for (int c = 0; c < context.size; ++c) {
      const Merge m = merge_at(context, c, half);
      if (m.kind != Merge::adds) continue;
      std::vector<Operand> operands{local(held[c]), from(m.peer, m.partial)};
      if (m.from_left) std::swap(operands[0], operands[1]);
      if (held[c].region == Region::input) held[c] = sum_of(c);
      steps.push_back(reduce_step(held[c], std::move(operands), 2 * half >= context.size));
    }
  }
  if (context.size == 1) steps.push_back(reduce_step(output(0), {local(input(0))}, true));
}

/// Every result from its chunk's rank to all others, in the output.
void gather_by_trees(RankContext context, std::vector<Step>& steps) {
  for (int half = static_cast<int>(std::bit_floor(static_cast<unsigned>(context.size - 1))); half > 0;
       half /= 2) {
    for (int c = 0; c < context.size; ++c)
      if (const Merge m = merge_at(context, c, half); m.kind == Merge::adds)
        steps.push_back(send(m.peer, output(c)));
    for (int c = 0; c < context.size; ++c)
      if (const Merge m = merge_at(context, c, half); m.kind == Merge::sends)
        steps.push_back(recv(output(c), m.peer));
  }
}

}  // namespace

Schedule distance_doubling_all_reduce(RankContext context) {
  Schedule s{.chunks = context.size};
  reduce_by_trees(context, s.steps, output);
  gather_by_trees(context, s.steps);
  return s;
}

Schedule distance_doubling_reduce_scatter(RankContext context) {
  Schedule s{.chunks = context.size};
  reduce_by_trees(context, s.steps,
                  [&](int c) { return c == context.rank ? output(c) : scratch(s.scratch_cells++, c); });
  return s;
}

// Each rank sends its result to the root.
Schedule distance_doubling_reduce(RankContext context) {
  const bool root = context.rank == context.root;
  Schedule s{.chunks = context.size};
  ChunkRef own = output(context.rank);
  reduce_by_trees(context, s.steps, [&](int c) {
    const ChunkRef sum = root ? output(c) : scratch(s.scratch_cells++, c);
    return c == context.rank ? own = sum : sum;
  });
  if (!root) s.steps.push_back(send(context.root, own));
  for (int c = 0; root && c < context.size; ++c)
    if (c != context.rank) s.steps.push_back(recv(output(c), c));
  return s;
}

}  // namespace rz::schedule
