// Reductions over nodes in rank order. A chunk has an owner on every node, which reads the contributions of
// its node's ranks (over shared memory) and adds them, in rank order, to the sum of the previous nodes,
// received from the chunk's owner there: (((x0 + x1) + x2) + x3) with two ranks on each of two nodes. The
// last node has the result. Slices are pipelined down the chain, so that a large buffer leaves a node once
// each way, independent of the number of ranks on it, while in two_shot every rank sends to every other. It
// is the chain of chain.cpp with nodes in place of ranks and one lane per rank of a node.
//
// Requires consecutive ranks on every node. 8- and 16-bit floats are rounded once per node.

#include <algorithm>

#include "comm/schedule/algorithms/node_map.h"
#include "comm/schedule/schedule.h"

namespace rz::schedule {

namespace {

/// Chunks of a lane whose results are scattered over the nodes.
constexpr int max_chunks_per_lane = 32;

/// Sends this rank's contributions to the owners on its node. `chunks_of(rank)`: the chunks that a rank of
/// this node owns, in an order that is the same on all ranks, since it is the order of messages.
template <class ChunksOf>
void send_to_owners(const NodeMap& nodes, ChunksOf chunks_of, std::vector<Step>& steps) {
  for (const int peer : nodes.local_peers())
    for (const int chunk : chunks_of(peer)) steps.push_back(send(peer, input(chunk)));
}

/// One node's part of the chain in lane `lane`: adds this node's contributions to the sum of the previous
/// nodes, into `sum`, and sends it to the next node.
void reduce_node(const NodeMap& nodes, int lane, ChunkRef sum, std::vector<Step>& steps) {
  std::vector<Operand> operands = nodes.local_operands(input(sum.number));
  const bool nothing_to_add = nodes.my_node() == 0 && operands.size() == 1 && !nodes.last();
  if (nothing_to_add) return steps.push_back(send(nodes.lane_owner(1, lane), input(sum.number)));
  if (nodes.my_node() > 0)
    operands.insert(operands.begin(), from(nodes.lane_owner(nodes.my_node() - 1, lane),
                                           nodes.my_node() > 1 || nodes.ranks(0).size() > 1));
  steps.push_back(reduce_step(sum, std::move(operands), nodes.last()));
  if (!nodes.last()) steps.push_back(send(nodes.lane_owner(nodes.my_node() + 1, lane), sum));
}

/// The function chunks_of() for lanes of `chunks_per_lane` consecutive chunks.
auto lanes_of(const NodeMap& nodes, int chunks_per_lane = 1) {
  return [&nodes, chunks_per_lane](int rank) {
    std::vector<int> chunks;
    const int there = static_cast<int>(nodes.ranks(nodes.my_node()).size());
    for (int lane = nodes.index_of(rank); lane < nodes.largest(); lane += there)
      for (int i = 0; i < chunks_per_lane; ++i) chunks.push_back(lane * chunks_per_lane + i);
    return chunks;
  };
}

/// All_gather of results among the ranks of this node.
template <class ChunksOf>
void local_all_gather(const NodeMap& nodes, int rank, ChunksOf chunks_of, std::vector<Step>& steps) {
  for (const int peer : nodes.local_peers())
    for (const int c : chunks_of(rank)) steps.push_back(send(peer, output(c)));
  for (const int peer : nodes.local_peers(true))
    for (const int c : chunks_of(peer)) steps.push_back(recv(output(c), peer));
}

/// Sends a result of lane `lane` from the last node to all others, through node `relay`.
void relay_result(const NodeMap& nodes, int lane, int relay, ChunkRef result, std::vector<Step>& steps) {
  const int last = nodes.count() - 1;
  if (nodes.my_node() == last && relay != last)
    return steps.push_back(send(nodes.lane_owner(relay, lane), result));
  if (nodes.my_node() != last)
    steps.push_back(recv(result, nodes.lane_owner(nodes.my_node() == relay ? last : relay, lane)));
  for (int d = 1; nodes.my_node() == relay && d < nodes.count(); ++d)
    if (const int to = nodes.around(d); to != last) steps.push_back(send(nodes.lane_owner(to, lane), result));
}

}  // namespace

// The result moves back along the chain, and each owner distributes it within its node.
Schedule hierarchical_chain_all_reduce(RankContext context) {
  const NodeMap nodes = NodeMap::contiguous(context, "hierarchical_chain");
  const auto chunks_of = lanes_of(nodes);
  const std::vector<int> mine = chunks_of(context.rank);
  Schedule s{.chunks = nodes.largest()};
  send_to_owners(nodes, chunks_of, s.steps);
  for (const int c : mine) reduce_node(nodes, c, output(c), s.steps);
  for (const int c : mine) {
    if (!nodes.last()) s.steps.push_back(recv(output(c), nodes.lane_owner(nodes.my_node() + 1, c)));
    if (nodes.my_node() > 0) s.steps.push_back(send(nodes.lane_owner(nodes.my_node() - 1, c), output(c)));
  }
  local_all_gather(nodes, context.rank, chunks_of, s.steps);
  return s;
}

// The last node scatters its results over the nodes, and each sends its chunks to all others: the broadcast
// of scatter_all_gather.cpp between nodes. For a buffer of n bytes and H nodes, the last node sends n (H - 1)
// / H bytes to the relays and as many of its own chunks; each other node sends n along the chain and n (H -
// 2) / H of results. That is no more than in a ring, while the way back along the chain makes inner nodes
// send 2n. Relays alternate over the chunks of a lane, beginning with the last node, so that results move
// while the sums do. Chunks are small, since the last chunk of a lane is relayed when most links are already
// idle. With two nodes there is nothing to scatter, and the algorithm is the plain chain.
Schedule hierarchical_chain_all_gather_all_reduce(RankContext context) {
  const NodeMap nodes = NodeMap::contiguous(context, "hierarchical_chain_all_gather");
  const int last = nodes.count() - 1, turns = std::max(1, max_chunks_per_lane / nodes.count());
  const int chunks_per_lane = nodes.count() > 2 ? turns * nodes.count() : 1;
  const auto chunks_of = lanes_of(nodes, chunks_per_lane);
  const std::vector<int> mine = chunks_of(context.rank);
  Schedule s{.chunks = nodes.largest() * chunks_per_lane};
  send_to_owners(nodes, chunks_of, s.steps);
  for (const int c : mine) reduce_node(nodes, c / chunks_per_lane, output(c), s.steps);
  for (const int c : mine)
    relay_result(nodes, c / chunks_per_lane, last - c % chunks_per_lane % nodes.count(), output(c), s.steps);
  local_all_gather(nodes, context.rank, chunks_of, s.steps);
  return s;
}

// The last node sends each result to the rank that it belongs to; the owner's own chunk is reduced into its
// output.
Schedule hierarchical_chain_reduce_scatter(RankContext context) {
  const NodeMap nodes = NodeMap::contiguous(context, "hierarchical_chain");
  const auto chunks_of = [&](int rank) {
    std::vector<int> chunks;
    for (int c = 0; c < context.size; ++c)
      if (nodes.lane_owner(nodes.my_node(), nodes.index_of(c)) == rank) chunks.push_back(c);
    return chunks;
  };
  Schedule s{.chunks = context.size};
  send_to_owners(nodes, chunks_of, s.steps);
  for (const int c : chunks_of(context.rank)) {
    const bool own = nodes.last() && c == context.rank;
    const ChunkRef sum = own ? output(c) : scratch(s.scratch_cells++, c);
    reduce_node(nodes, nodes.index_of(c), sum, s.steps);
    if (nodes.last() && !own) s.steps.push_back(send(c, sum));
  }
  if (!nodes.last())
    s.steps.push_back(recv(output(context.rank), nodes.lane_owner(nodes.count() - 1, nodes.local_rank())));
  return s;
}

// The last node sends its results to the root.
Schedule hierarchical_chain_reduce(RankContext context) {
  const NodeMap nodes = NodeMap::contiguous(context, "hierarchical_chain");
  const auto chunks_of = lanes_of(nodes);
  const bool root = context.rank == context.root;
  Schedule s{.chunks = nodes.largest()};
  send_to_owners(nodes, chunks_of, s.steps);
  for (const int c : chunks_of(context.rank)) {
    const bool own = nodes.last() && root;
    const ChunkRef sum = own ? output(c) : scratch(s.scratch_cells++, c);
    reduce_node(nodes, c, sum, s.steps);
    if (nodes.last() && !own) s.steps.push_back(send(context.root, sum));
  }
  for (int c = 0; root && c < s.chunks; ++c)
    if (const int owner = nodes.lane_owner(nodes.count() - 1, c); owner != context.rank)
      s.steps.push_back(recv(output(c), owner));
  return s;
}

}  // namespace rz::schedule
