// Binomial tree: log2(n) levels; for rooted collectives, and for small all-reduces where messages are
// expensive. In a broadcast ranks are numbered relative to the root; the parent of v is v without its lowest
// set bit, and its children are v + 1, v + 2, v + 4, … below that bit. A reduction follows the reduction tree
// (reduction_tree.h), so it is in pairwise order for any root. Thakur, Rabenseifner and Gropp, "Optimization
// of collective communication operations in MPICH", doi:10.1177/1094342005051521.

#include "comm/schedule/algorithms/reduction_tree.h"
#include "comm/schedule/schedule.h"

namespace rz::schedule {

namespace {

struct Node {
  int parent = -1;            // -1 at the root
  std::vector<int> children;  // smallest subtree first
};

Node node_of(RankContext context) {
  const int v = (context.rank - context.root + context.size) % context.size;
  const auto rank = [&](int relative) { return (relative + context.root) % context.size; };
  Node node;
  const int lowest = v & -v;
  if (v != 0) node.parent = rank(v - lowest);
  for (int bit = 1; v + bit < context.size && (v == 0 || bit < lowest); bit *= 2)
    node.children.push_back(rank(v + bit));
  return node;
}

/// Reduces the only chunk towards the root: a rank adds its children's sums to its own input, one level of
/// the tree after the other, in `sum`, and sends the result to its parent.
void reduce_up(const ReductionNode& node, ChunkRef sum, std::vector<Step>& steps) {
  const bool leaf = node.operands.size() == 1 && node.parent >= 0;
  if (!leaf) steps.push_back(reduce_step(sum, node.operands, node.parent < 0));
  if (node.parent >= 0) steps.push_back(send(node.parent, leaf ? input(0) : sum));
}

// The largest subtree first, since it is the deepest.
void broadcast_down(const Node& node, ChunkRef what, std::vector<Step>& steps) {
  for (auto child = node.children.rbegin(); child != node.children.rend(); ++child)
    steps.push_back(send(*child, what));
}

}  // namespace

Schedule tree_all_reduce(RankContext context) {
  const Node node = node_of(context);
  Schedule s;
  reduce_up(reduction_node(context, 0, local(input(0))), output(0), s.steps);
  if (node.parent >= 0) s.steps.push_back(recv(output(0), node.parent));
  broadcast_down(node, output(0), s.steps);
  return s;
}

Schedule tree_reduce(RankContext context) {
  const ReductionNode node = reduction_node(context, context.root, local(input(0)));
  const bool in_between = node.parent >= 0 && node.operands.size() > 1;
  Schedule s{.scratch_cells = in_between ? 1 : 0};
  reduce_up(node, in_between ? scratch(0, 0) : output(0), s.steps);
  return s;
}

Schedule tree_broadcast(RankContext context) {
  const Node node = node_of(context);
  const bool root = node.parent < 0;
  Schedule s;
  s.steps.push_back(root ? copy(output(0), input(0)) : recv(output(0), node.parent));
  broadcast_down(node, root ? input(0) : output(0), s.steps);
  return s;
}

}  // namespace rz::schedule
