#include "comm/transport/group/connect_transport.h"

#include <algorithm>
#include <set>
#include <utility>

#include "comm/bootstrap/rendezvous.h"
#include "comm/bootstrap/store_internal.h"
#include "comm/core/error.h"
#include "comm/topology.h"
#include "comm/transport/group/group_transport.h"
#include "comm/transport/shm/shm_transport.h"
#include "comm/transport/shm_layout.h"
#include "comm/transport/tcp/tcp_transport.h"

namespace rz {

namespace {

/// What a transport of one rank is made from.
struct TransportSetup {
  const PeerInfo& peer_info;
  const TransportOptions& options;
  const Store& store;
  std::shared_ptr<LinkMonitor> monitor;
};

std::unique_ptr<MonitoredTransport> make_shm(const TransportSetup& from, std::vector<int> peers) {
  const std::size_t ring = peers.empty() ? 0 : staging_ring_bytes(caches(), peers.size() + 1);
  const int rank = from.peer_info.rank;
  peers.insert(std::upper_bound(peers.begin(), peers.end(), rank), rank);
  return std::make_unique<ShmTransport>(from.monitor, std::move(peers), ring, from.options.memory);
}

/// The names of hosts in the ids of machines.
std::vector<std::string> hosts_of(const std::vector<std::string>& machines) {
  std::vector<std::string> hosts;
  for (const std::string& id : machines) {
    const auto parts = parts_of(id, '/');
    hosts.push_back(parts.size() > 1 ? parts[1] : id);
  }
  return hosts;
}

std::unique_ptr<MonitoredTransport> make_tcp(const TransportSetup& from, std::vector<int> peers) {
  const auto& machines = from.peer_info.machines;
  const bool one_machine = std::set(machines.begin(), machines.end()).size() == 1;
  const TcpOptions options{
      sockets_per_peer(from.monitor->nodes(), from.peer_info.settings.sockets), from.options.congestion,
      peers.empty()
          ? net::SocketAddress{}
          : choose_address(from.options.interface, one_machine, tcp_store_local_address(from.store)),
      hosts_of(machines), from.options.detection.count() ? from.options.detection : TcpOptions().max_silence};
  return std::make_unique<TcpTransport>(from.monitor, std::move(peers), options);
}

struct TransportKind {
  const char* name;
  bool shares_memory;  ///< connects ranks of one node only
  /// `peers`: those that it connects this rank with, ascending; maybe none.
  std::unique_ptr<MonitoredTransport> (*make)(const TransportSetup&, std::vector<int> peers);
};

/// All kinds of transport, preferred ones first.
constexpr TransportKind transport_kinds[] = {{"shm", true, make_shm}, {"tcp", false, make_tcp}};

/// The kinds that may connect ranks: the first within a node, the first that does not share memory between
/// nodes.
std::vector<const TransportKind*> choose_kinds(const std::string& wanted) {
  std::vector<const TransportKind*> chosen;
  std::string names = "auto";
  for (const TransportKind& kind : transport_kinds) {
    names += concat(", ", kind.name);
    if (wanted == "auto" || wanted == kind.name) chosen.push_back(&kind);
  }
  require(!chosen.empty(), Errc::config, "transport '", wanted, "' is not one of ", names);
  return chosen;
}

/// The node numbers of all ranks (Transport::nodes()). If no two share memory, every rank counts as a node.
std::vector<int> number_nodes(const PeerInfo& peer_info, bool share_memory) {
  std::vector<int> numbers;
  std::vector<std::string> seen;
  for (const std::string& id : peer_info.host_ids) {
    const auto at = std::find(seen.begin(), seen.end(), id);
    const bool known = at != seen.end() && share_memory;
    numbers.push_back(static_cast<int>(known ? at - seen.begin() : std::ssize(seen)));
    if (!known) seen.push_back(id);
  }
  return numbers;
}

/// Exchanges the addresses of the ranks and connects with all peers.
void connect_all(MonitoredTransport& transport, const net::HandshakeInfo& me, Store& store,
                 Deadline deadline) {
  const auto addresses = store_all_gather(me.rank, me.size, store, "address", transport.address(), deadline);
  transport.connect(me, addresses, deadline);
  if (me.size > 1) await_connected(me.rank, me.size, store, deadline, [&] { transport.progress(0); });
}

}  // namespace

// Frames to a peer are striped over its sockets, and all sockets of a node share its network. With more
// sockets, every frame takes longer, and so do all transfers that depend on it.
int sockets_per_peer(std::span<const int> nodes, int wanted) {
  std::ptrdiff_t sharing = 1;
  for (const int node : nodes) sharing = std::max(sharing, std::count(nodes.begin(), nodes.end(), node));
  return std::max(1, wanted / static_cast<int>(sharing));
}

// A group on one node has shared memory alone, one of a rank per node TCP alone, others have both; a rank
// that is alone on its node then has no peer in shared memory.
std::unique_ptr<Transport> connect_transport(const PeerInfo& peer_info, Store& store,
                                             const TransportOptions& options, Deadline deadline) {
  const int rank = peer_info.rank, size = peer_info.size();
  const std::string& wanted = peer_info.settings.transport;
  const auto kinds = choose_kinds(wanted);
  const net::Encryption encryption =
      is_insecure(store) ? net::Encryption::off : net::parse_encryption(peer_info.settings.encryption);
  const TransportKind& within_node = *kinds.front();
  const auto between_nodes = std::ranges::find(kinds, false, &TransportKind::shares_memory);
  const std::vector<int> nodes = number_nodes(peer_info, within_node.shares_memory);
  std::vector<int> near, far;  // the peers on this node, and others
  for (int r = 0; r < size; ++r)
    if (r != rank)
      (nodes[static_cast<std::size_t>(r)] == nodes[static_cast<std::size_t>(rank)] ? near : far).push_back(r);
  require(between_nodes != kinds.end() || far.empty(), Errc::config, "transport '", wanted, "', but rank ",
          net::list_ranks(far), " is not on the node of rank ", rank, "; use 'auto'");
  bool oversubscribed = peer_info.oversubscribed(rank);
  for (const int r : near) oversubscribed |= peer_info.oversubscribed(r);
  const TransportSetup from{peer_info, options, store,
                            std::make_shared<LinkMonitor>(rank, nodes, oversubscribed, options.parent)};
  const int node_count = 1 + *std::max_element(nodes.begin(), nodes.end());
  std::unique_ptr<MonitoredTransport> transport;
  if (node_count == 1) {
    transport = within_node.make(from, near);
  } else if (node_count == size) {
    transport = (*between_nodes)->make(from, far);
  } else {
    auto group = std::make_unique<GroupTransport>(from.monitor);
    group->add(within_node.make(from, near), near);
    group->add((*between_nodes)->make(from, far), far);
    transport = std::move(group);
  }
  try {
    const auto check = [&] { throw_published_failure(rank, store); };
    connect_all(*transport, {peer_info.job_id, rank, size, {}, check, tcp_store_secret(store), encryption},
                store, deadline);
  } catch (const Error& e) {
    if (e.culprit() >= 0) throw_published_failure(rank, store);
    throw;
  }
  return transport;
}

}  // namespace rz
