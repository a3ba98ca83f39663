#include "comm/schedule/algorithms/reduction_tree.h"

namespace rz::schedule {

namespace {

/// The rank that holds the sum of the block of `ranks` ranks from `first` on.
int holder(int size, int target, int first, int ranks) {
  for (int half = ranks / 2; half > 0; half /= 2)
    if ((target & half) && first + half < size) first += half;
  return first;
}

}  // namespace

Merge merge_at(RankContext context, int target, int half) {
  const int mine = context.rank / half * half, other = mine ^ half;
  if (other >= context.size || holder(context.size, target, mine, half) != context.rank) return {};
  const bool adds = holder(context.size, target, mine & other, 2 * half) == context.rank;
  return {adds ? Merge::adds : Merge::sends, holder(context.size, target, other, half),
          half > 1 && other + 1 < context.size, other < mine};
}

ReductionNode reduction_node(RankContext context, int target, Operand mine) {
  ReductionNode node{.operands = {mine}};
  for (int half = 1; half < context.size && node.parent < 0; half *= 2) {
    const Merge merge = merge_at(context, target, half);
    if (merge.kind == Merge::adds) node.operands.push_back(from(merge.peer, merge.partial));
    if (merge.kind == Merge::sends) node.parent = merge.peer;
  }
  return node;
}

}  // namespace rz::schedule
