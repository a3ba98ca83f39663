// Over hosts in two levels. Every rank has a stand-in on each other host, the rank of the same place there
// (ranks take turns where a host has fewer). What a rank gathers from, or hands to, another host goes through
// the stand-in: it sums its host's contributions to the rank's chunk, by shared memory, and sends one sum; it
// receives the rank's chunk and hands it to its host. So a chunk crosses between two hosts once, and not once
// for every rank. Hosts exchange directly, all pairs at once. Every rank leads for one
// chunk of each host, as in Kandalla, Subramoni, Santhanaraman, Koop and Panda, "Designing multi-leader-based
// Allgather algorithms for multi-core clusters", IPDPS 2009 (CAC workshop).
//
// Sums are those of hosts, and so in no rank order: beyond one host, for `deterministic = false`.

#include "comm/schedule/algorithms/node_map.h"
#include "comm/schedule/algorithms/ring_neighbours.h"

namespace rz {

namespace {

/// The chunks (by the ranks that they belong to) that a rank of this host sums, as a stand-in and then for
/// itself: an own chunk waits for the stand-ins, which must not wait for it.
std::vector<int> partial_sums(const NodeMap& hosts, int rank, int size) {
  std::vector<int> chunks;
  for (int c = 0; c < size; ++c)
    if (hosts.node_of(c) != hosts.my_node() && hosts.lane_owner(hosts.my_node(), hosts.index_of(c)) == rank)
      chunks.push_back(c);
  chunks.push_back(rank);
  return chunks;
}

/// `partial(chunk)` is where a stand-in keeps its host's sum.
template <class Partial>
void reduce_by_node(RankContext seat, const NodeMap& hosts, Partial partial, std::vector<Step>& steps) {
  for (const int peer : hosts.local_peers())
    for (const int c : partial_sums(hosts, peer, seat.size)) steps.push_back(send(peer, input(c)));
  const bool alone = hosts.ranks(hosts.my_node()).size() == 1;
  for (const int c : partial_sums(hosts, seat.rank, seat.size)) {
    if (c == seat.rank) continue;
    const ChunkRef sum = alone ? input(c) : partial(c);
    if (!alone) steps.push_back(reduce_step(sum, hosts.local_operands(input(c))));
    steps.push_back(send(c, sum));
  }
  std::vector<Operand> terms;
  for (int h = 0; h < hosts.count(); ++h)
    if (h != hosts.my_node()) terms.push_back(from(hosts.lane_owner(h, hosts.local_rank())));
  const std::vector<Operand> here = hosts.local_operands(input(seat.rank));
  terms.insert(terms.begin(), here.begin(), here.end());
  steps.push_back(reduce_step(output(seat.rank), std::move(terms), true));
}

/// The chunks of another host that a rank of this one stands in for.
std::vector<int> lane_peer(const NodeMap& hosts, int rank, int host) {
  std::vector<int> chunks;
  for (const int c : hosts.ranks(host))
    if (hosts.lane_owner(hosts.my_node(), hosts.index_of(c)) == rank) chunks.push_back(c);
  return chunks;
}

/// Every rank's chunk, the own one from `own`, to every output.
void gather_by_node(RankContext seat, const NodeMap& hosts, ChunkRef own, std::vector<Step>& steps) {
  for (int d = 1; d < hosts.count(); ++d)
    steps.push_back(send(hosts.lane_owner(hosts.around(d), hosts.local_rank()), own));
  for (const int peer : hosts.local_peers()) steps.push_back(send(peer, own));
  for (int d = 1; d < hosts.count(); ++d)
    for (const int c : lane_peer(hosts, seat.rank, hosts.around(-d))) {
      steps.push_back(recv(output(c), c));
      for (const int peer : hosts.local_peers()) steps.push_back(send(peer, output(c)));
    }
  for (const int peer : hosts.local_peers(true)) {
    steps.push_back(recv(output(peer), peer));
    for (int d = 1; d < hosts.count(); ++d)
      for (const int c : lane_peer(hosts, peer, hosts.around(-d))) steps.push_back(recv(output(c), peer));
  }
}

}  // namespace

// Partial sums lie where the results of other ranks come to lie.
Schedule hierarchical_all_reduce(RankContext seat) {
  const NodeMap hosts(seat);
  Schedule s{.chunks = seat.size};
  reduce_by_node(
      seat, hosts, [](int chunk) { return output(chunk); }, s.steps);
  gather_by_node(seat, hosts, output(seat.rank), s.steps);
  return s;
}

Schedule hierarchical_reduce_scatter(RankContext seat) {
  const NodeMap hosts(seat);
  Schedule s{.chunks = seat.size};
  reduce_by_node(
      seat, hosts, [&](int chunk) { return scratch(s.scratch_chunks++, chunk); }, s.steps);
  return s;
}

Schedule hierarchical_all_gather(RankContext seat) {
  Schedule s{.chunks = seat.size, .steps = {copy(output(seat.rank), input(seat.rank))}};
  gather_by_node(seat, NodeMap(seat), input(seat.rank), s.steps);
  return s;
}

}  // namespace rz
