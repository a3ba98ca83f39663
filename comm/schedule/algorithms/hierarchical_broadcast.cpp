// Broadcast along a chain of nodes that begins at the root's. A chunk has an owner on every node. The root
// sends it to the owner on its own node (over shared memory); each owner sends it to the next node's owner
// and to the other ranks of its node. Every node receives the buffer once and sends it once, in as many lanes
// as ranks, and slices are pipelined down the chain. In scatter_all_gather, in contrast, every rank sends to
// every rank.

#include "comm/schedule/algorithms/node_map.h"
#include "comm/schedule/schedule.h"

namespace rz::schedule {

namespace {

/// One rank's view of the chain.
struct BroadcastChain {
  RankContext context;
  NodeMap nodes{context};
  bool at_root = nodes.my_node() == nodes.node_of(context.root);
  bool at_end = nodes.around(1) == nodes.node_of(context.root);

  int owner(int chunk) const { return nodes.lane_owner(nodes.my_node(), chunk); }
  int predecessor(int chunk) const {
    return at_root ? context.root : nodes.lane_owner(nodes.around(-1), chunk);
  }

  void relay(int chunk, ChunkRef what, std::vector<Step>& steps) const {
    if (!at_end) steps.push_back(send(nodes.lane_owner(nodes.around(1), chunk), what));
    for (const int peer : nodes.local_peers())
      if (peer != context.root) steps.push_back(send(peer, what));
  }
};

}  // namespace

Schedule hierarchical_chain_broadcast(RankContext context) {
  const BroadcastChain chain{context};
  Schedule s{.chunks = chain.nodes.largest()};
  const bool root = context.rank == context.root;
  for (int c = 0; root && c < s.chunks; ++c) s.steps.push_back(copy(output(c), input(c)));
  for (int c = 0; c < s.chunks; ++c) {
    const int owner = chain.owner(c);
    if (root && owner != context.rank) {
      s.steps.push_back(send(owner, input(c)));
    } else if (owner == context.rank) {
      if (!root) s.steps.push_back(recv(output(c), chain.predecessor(c)));
      chain.relay(c, root ? input(c) : output(c), s.steps);
    } else {
      s.steps.push_back(recv(output(c), owner));
    }
  }
  return s;
}

}  // namespace rz::schedule
