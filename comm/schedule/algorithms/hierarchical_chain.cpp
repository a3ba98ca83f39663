// Reductions over hosts in rank order. A chunk has an owner on every host, which fetches what its host's
// ranks hold (by shared memory) and folds it, in their order, onto the sum of the hosts before, which the
// chunk's owner there has sent: (((x0 + x1) + x2) + x3) with two ranks on each of two hosts. The last host
// has the result. Slices follow each other down the chain, so that a large buffer costs one transfer of it
// out of a host each way, however many ranks a host has, where two_shot has each rank send to each other. It
// is the chain of chain.cpp with hosts for links, and an own lane of it for every rank of a host.
//
// Every host has to hold consecutive ranks. Small floats are rounded once a host.

#include <algorithm>

#include "comm/schedule/algorithms/node_map.h"
#include "comm/schedule/algorithms/ring_neighbours.h"

namespace rz {

namespace {

/// Of a lane whose results are shared out over the hosts.
constexpr int max_parts = 32;

/// `duties(rank)`: the chunks that a rank of this host owns. In the order of messages: of two ranks, both go
/// through them in the same order.
template <class Duties>
void send_to_owners(const NodeMap& hosts, Duties duties, std::vector<Step>& steps) {
  for (const int peer : hosts.local_peers())
    for (const int chunk : duties(peer)) steps.push_back(send(peer, input(chunk)));
}

/// Takes lane `lane` of the chain one host further: this host's ranks onto the hosts before, into `sum`, and
/// on to the next host.
void reduce_node(const NodeMap& hosts, int lane, ChunkRef sum, std::vector<Step>& steps) {
  std::vector<Operand> terms = hosts.local_operands(input(sum.chunk));
  const bool nothing_to_add = hosts.my_node() == 0 && terms.size() == 1 && !hosts.last();
  if (nothing_to_add) return steps.push_back(send(hosts.lane_owner(1, lane), input(sum.chunk)));
  if (hosts.my_node() > 0) terms.insert(terms.begin(), from(hosts.lane_owner(hosts.my_node() - 1, lane)));
  steps.push_back(reduce_step(sum, std::move(terms), hosts.last()));
  if (!hosts.last()) steps.push_back(send(hosts.lane_owner(hosts.my_node() + 1, lane), sum));
}

/// Lane i is the chunks from i * parts on.
auto lanes_of(const NodeMap& hosts, int parts = 1) {
  return [&hosts, parts](int rank) {
    std::vector<int> chunks;
    const int there = static_cast<int>(hosts.ranks(hosts.my_node()).size());
    for (int lane = hosts.index_of(rank); lane < hosts.largest(); lane += there)
      for (int i = 0; i < parts; ++i) chunks.push_back(lane * parts + i);
    return chunks;
  };
}

/// Hands this host's results to its other ranks. `duties` as above.
template <class Duties>
void local_all_gather(const NodeMap& hosts, int rank, Duties duties, std::vector<Step>& steps) {
  for (const int peer : hosts.local_peers())
    for (const int c : duties(rank)) steps.push_back(send(peer, output(c)));
  for (const int peer : hosts.local_peers(true))
    for (const int c : duties(peer)) steps.push_back(recv(output(c), peer));
}

/// A result of lane `lane` from the last host to all others, by way of host `relay`.
void relay_result(const NodeMap& hosts, int lane, int relay, ChunkRef result, std::vector<Step>& steps) {
  const int last = hosts.count() - 1;
  if (hosts.my_node() == last && relay != last)
    return steps.push_back(send(hosts.lane_owner(relay, lane), result));
  if (hosts.my_node() != last)
    steps.push_back(recv(result, hosts.lane_owner(hosts.my_node() == relay ? last : relay, lane)));
  for (int d = 1; hosts.my_node() == relay && d < hosts.count(); ++d)
    if (const int to = hosts.around(d); to != last) steps.push_back(send(hosts.lane_owner(to, lane), result));
}

}  // namespace

// The result runs back along the chain, each owner handing it to its host's ranks on the way.
Schedule hierarchical_chain_all_reduce(RankContext seat) {
  const NodeMap hosts = NodeMap::contiguous(seat, "hierarchical_chain");
  const auto duties = lanes_of(hosts);
  const std::vector<int> mine = duties(seat.rank);
  Schedule s{.chunks = hosts.largest()};
  send_to_owners(hosts, duties, s.steps);
  for (const int c : mine) reduce_node(hosts, c, output(c), s.steps);
  for (const int c : mine) {
    if (!hosts.last()) s.steps.push_back(recv(output(c), hosts.lane_owner(hosts.my_node() + 1, c)));
    if (hosts.my_node() > 0) s.steps.push_back(send(hosts.lane_owner(hosts.my_node() - 1, c), output(c)));
  }
  local_all_gather(hosts, seat.rank, duties, s.steps);
  return s;
}

// The last host scatters its results over the hosts, each of which hands its parts to all others: the
// broadcast of scatter_all_gather.cpp, between hosts. Of a buffer n and H hosts, the last one sends
// n (H - 1) / H to the others and as much of its own parts, and each other n along the chain and
// n (H - 2) / H of results: no more than in a ring, where the way back along the chain has hosts in the
// middle send 2n. Hosts take turns with the parts of a lane, that of the last host first, so that results are
// on their way while sums are. Parts are small, since the last one of a lane goes out once its relay has it,
// when most links have nothing left to send. Two hosts have nothing to share out: there it is the chain.
Schedule hierarchical_chain_all_gather_all_reduce(RankContext seat) {
  const NodeMap hosts = NodeMap::contiguous(seat, "hierarchical_chain_all_gather");
  const int last = hosts.count() - 1, turns = std::max(1, max_parts / hosts.count());
  const int parts = hosts.count() > 2 ? turns * hosts.count() : 1;
  const auto duties = lanes_of(hosts, parts);
  const std::vector<int> mine = duties(seat.rank);
  Schedule s{.chunks = hosts.largest() * parts};
  send_to_owners(hosts, duties, s.steps);
  for (const int c : mine) reduce_node(hosts, c / parts, output(c), s.steps);
  for (const int c : mine)
    relay_result(hosts, c / parts, last - c % parts % hosts.count(), output(c), s.steps);
  local_all_gather(hosts, seat.rank, duties, s.steps);
  return s;
}

// The last host sends each result to the rank that it belongs to, and a part of its own ends where it should.
Schedule hierarchical_chain_reduce_scatter(RankContext seat) {
  const NodeMap hosts = NodeMap::contiguous(seat, "hierarchical_chain");
  const auto duties = [&](int rank) {
    std::vector<int> chunks;
    for (int c = 0; c < seat.size; ++c)
      if (hosts.lane_owner(hosts.my_node(), hosts.index_of(c)) == rank) chunks.push_back(c);
    return chunks;
  };
  Schedule s{.chunks = seat.size};
  send_to_owners(hosts, duties, s.steps);
  for (const int c : duties(seat.rank)) {
    const bool own = hosts.last() && c == seat.rank;
    const ChunkRef sum = own ? output(c) : scratch(s.scratch_chunks++, c);
    reduce_node(hosts, hosts.index_of(c), sum, s.steps);
    if (hosts.last() && !own) s.steps.push_back(send(c, sum));
  }
  if (!hosts.last())
    s.steps.push_back(recv(output(seat.rank), hosts.lane_owner(hosts.count() - 1, hosts.local_rank())));
  return s;
}

// The last host sends its results to the root.
Schedule hierarchical_chain_reduce(RankContext seat) {
  const NodeMap hosts = NodeMap::contiguous(seat, "hierarchical_chain");
  const auto duties = lanes_of(hosts);
  const bool root = seat.rank == seat.root;
  Schedule s{.chunks = hosts.largest()};
  send_to_owners(hosts, duties, s.steps);
  for (const int c : duties(seat.rank)) {
    const bool own = hosts.last() && root;
    const ChunkRef sum = own ? output(c) : scratch(s.scratch_chunks++, c);
    reduce_node(hosts, c, sum, s.steps);
    if (hosts.last() && !own) s.steps.push_back(send(seat.root, sum));
  }
  for (int c = 0; root && c < s.chunks; ++c)
    if (const int owner = hosts.lane_owner(hosts.count() - 1, c); owner != seat.rank)
      s.steps.push_back(recv(output(c), owner));
  return s;
}

}  // namespace rz
