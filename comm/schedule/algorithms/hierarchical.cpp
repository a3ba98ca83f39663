// Two-level algorithms over nodes. Every rank has a proxy on each other node: the rank with the same local
// index there (round-robin if the node has fewer ranks). All traffic of a rank with another node passes
// through its proxy. In a reduction the proxy reduces its node's contributions to the rank's chunk over
// shared memory and sends one sum; in an all_gather it receives the rank's chunk and distributes it within
// its node. So a chunk crosses between two nodes once, not once per rank. All pairs of nodes exchange
// directly and at once. Every rank is the leader for one chunk of each node, as in Kandalla, Subramoni,
// Santhanaraman, Koop and Panda, "Designing multi-leader-based Allgather algorithms for multi-core clusters",
// IPDPS 2009 (CAC workshop).
//
// The operands are sums of nodes, so reductions over several nodes are not in rank order: `deterministic =
// false` only.

#include "comm/schedule/algorithms/node_map.h"
#include "comm/schedule/schedule.h"

namespace rz::schedule {

namespace {

/// The chunks (numbered by the ranks that they belong to) that a rank of this node reduces: first those as a
/// proxy, then its own. The own chunk depends on remote proxies, which must not depend on it.
std::vector<int> partial_sums(const NodeMap& nodes, int rank, int size) {
  std::vector<int> chunks;
  for (int c = 0; c < size; ++c)
    if (nodes.node_of(c) != nodes.my_node() && nodes.lane_owner(nodes.my_node(), nodes.index_of(c)) == rank)
      chunks.push_back(c);
  chunks.push_back(rank);
  return chunks;
}

/// `partial(chunk)`: where the node's sum is at its proxy.
template <class Partial>
void reduce_by_node(RankContext context, const NodeMap& nodes, Partial partial, std::vector<Step>& steps) {
  for (const int peer : nodes.local_peers())
    for (const int c : partial_sums(nodes, peer, context.size)) steps.push_back(send(peer, input(c)));
  const bool alone = nodes.ranks(nodes.my_node()).size() == 1;
  for (const int c : partial_sums(nodes, context.rank, context.size)) {
    if (c == context.rank) continue;
    const ChunkRef sum = alone ? input(c) : partial(c);
    if (!alone) steps.push_back(reduce_step(sum, nodes.local_operands(input(c))));
    steps.push_back(send(c, sum));
  }
  std::vector<Operand> operands;
  for (int h = 0; h < nodes.count(); ++h)
    if (h != nodes.my_node())
      operands.push_back(from(nodes.lane_owner(h, nodes.local_rank()), nodes.ranks(h).size() > 1));
  const std::vector<Operand> here = nodes.local_operands(input(context.rank));
  operands.insert(operands.begin(), here.begin(), here.end());
  steps.push_back(reduce_step(output(context.rank), std::move(operands), true));
}

/// The chunks of another node for which a rank of this node is the proxy.
std::vector<int> proxied_chunks(const NodeMap& nodes, int rank, int node) {
  std::vector<int> chunks;
  for (const int c : nodes.ranks(node))
    if (nodes.lane_owner(nodes.my_node(), nodes.index_of(c)) == rank) chunks.push_back(c);
  return chunks;
}

/// All_gather of every rank's chunk, the own one from `own`.
void gather_by_node(RankContext context, const NodeMap& nodes, ChunkRef own, std::vector<Step>& steps) {
  for (int d = 1; d < nodes.count(); ++d)
    steps.push_back(send(nodes.lane_owner(nodes.around(d), nodes.local_rank()), own));
  for (const int peer : nodes.local_peers()) steps.push_back(send(peer, own));
  for (int d = 1; d < nodes.count(); ++d)
    for (const int c : proxied_chunks(nodes, context.rank, nodes.around(-d))) {
      steps.push_back(recv(output(c), c));
      for (const int peer : nodes.local_peers()) steps.push_back(send(peer, output(c)));
    }
  for (const int peer : nodes.local_peers(true)) {
    steps.push_back(recv(output(peer), peer));
    for (int d = 1; d < nodes.count(); ++d)
      for (const int c : proxied_chunks(nodes, peer, nodes.around(-d)))
        steps.push_back(recv(output(c), peer));
  }
}

}  // namespace

// Partial sums are kept in output chunks, which receive the results of other ranks later.
Schedule hierarchical_all_reduce(RankContext context) {
  const NodeMap nodes(context);
  Schedule s{.chunks = context.size};
  reduce_by_node(
      context, nodes, [](int chunk) { return output(chunk); }, s.steps);
  gather_by_node(context, nodes, output(context.rank), s.steps);
  return s;
}

Schedule hierarchical_reduce_scatter(RankContext context) {
  const NodeMap nodes(context);
  Schedule s{.chunks = context.size};
  reduce_by_node(
      context, nodes, [&](int chunk) { return scratch(s.scratch_cells++, chunk); }, s.steps);
  return s;
}

Schedule hierarchical_all_gather(RankContext context) {
  Schedule s{.chunks = context.size, .steps = {copy(output(context.rank), input(context.rank))}};
  gather_by_node(context, NodeMap(context), input(context.rank), s.steps);
  return s;
}

}  // namespace rz::schedule
