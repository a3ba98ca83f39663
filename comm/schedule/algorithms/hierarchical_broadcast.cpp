// Broadcast along a chain of hosts, from the root's on around. A chunk has an owner on every host: the root
// hands it to that of its own host (by shared memory), each owner sends it to the next host's and to its own
// host's other ranks. Every host receives the buffer once and sends it once, in as many lanes as ranks, and
// slices follow each other down the chain; scatter_all_gather sends to each rank from each.

#include "comm/schedule/algorithms/node_map.h"
#include "comm/schedule/algorithms/ring_neighbours.h"

namespace rz {

namespace {

/// One rank's view of the chain.
struct BroadcastChain {
  RankContext seat;
  NodeMap hosts{seat};
  bool at_root = hosts.my_node() == hosts.node_of(seat.root);
  bool at_end = hosts.around(1) == hosts.node_of(seat.root);

  int owner(int chunk) const { return hosts.lane_owner(hosts.my_node(), chunk); }
  int predecessor(int chunk) const { return at_root ? seat.root : hosts.lane_owner(hosts.around(-1), chunk); }

  void relay(int chunk, ChunkRef what, std::vector<Step>& steps) const {
    if (!at_end) steps.push_back(send(hosts.lane_owner(hosts.around(1), chunk), what));
    for (const int peer : hosts.local_peers())
      if (peer != seat.root) steps.push_back(send(peer, what));
  }
};

}  // namespace

Schedule hierarchical_chain_broadcast(RankContext seat) {
  const BroadcastChain chain{seat};
  Schedule s{.chunks = chain.hosts.largest()};
  const bool root = seat.rank == seat.root;
  for (int c = 0; root && c < s.chunks; ++c) s.steps.push_back(copy(output(c), input(c)));
  for (int c = 0; c < s.chunks; ++c) {
    const int owner = chain.owner(c);
    if (root && owner != seat.rank) {
      s.steps.push_back(send(owner, input(c)));
    } else if (owner == seat.rank) {
      if (!root) s.steps.push_back(recv(output(c), chain.predecessor(c)));
      chain.relay(c, root ? input(c) : output(c), s.steps);
    } else {
      s.steps.push_back(recv(output(c), owner));
    }
  }
  return s;
}

}  // namespace rz
