#include "comm/transport/group/connect_transport.h"

#include <algorithm>
#include <set>
#include <utility>

#include "comm/bootstrap/store_internal.h"
#include "comm/core/error.h"
#include "comm/shared_memory/staging_ring.h"
#include "comm/topology.h"
#include "comm/transport/group/group_transport.h"
#include "comm/transport/group/peer_info.h"
#include "comm/transport/shm/shm_transport.h"
#include "comm/transport/tcp/listen_address.h"
#include "comm/transport/tcp/tcp_transport.h"

namespace rz {

namespace {

/// The peers of a rank: those that share memory with it, and others.
struct Peers {
  std::vector<int> near, far;
};

/// The host numbers of all ranks (Transport::hosts()). With kind "tcp", every rank counts as a host.
std::vector<int> number_hosts(const PeerInfo& peer_info, const std::string& kind) {
  std::vector<int> numbers;
  std::vector<std::string> seen;
  for (const std::string& host : peer_info.hosts) {
    const auto at = std::find(seen.begin(), seen.end(), host);
    const bool known = at != seen.end() && kind != "tcp";
    numbers.push_back(static_cast<int>(known ? at - seen.begin() : std::ssize(seen)));
    if (!known) seen.push_back(host);
  }
  return numbers;
}

Peers peers_of(int rank, const std::vector<int>& hosts) {
  Peers peers;
  for (int r = 0; r < std::ssize(hosts); ++r)
    if (r != rank)
      (hosts[static_cast<std::size_t>(r)] == hosts[static_cast<std::size_t>(rank)] ? peers.near : peers.far)
          .push_back(r);
  return peers;
}

/// The ranks of this host, ascending.
std::vector<int> with_self(std::vector<int> near, int rank) {
  near.insert(std::upper_bound(near.begin(), near.end(), rank), rank);
  return near;
}

net::SocketAddress listen_address(const PeerInfo& peer_info, const TransportOptions& options,
                                  const Store& store) {
  const bool one_machine = std::set(peer_info.machines.begin(), peer_info.machines.end()).size() == 1;
  return choose_address(options.interface, one_machine, tcp_store_local_address(store));
}

void check_arguments(int rank, int size, const TransportOptions& options) {
  require(size >= 1 && rank >= 0 && rank < size, Errc::invalid_argument, "rank ", rank, " of ", size);
  require(options.kind == "auto" || options.kind == "shm" || options.kind == "tcp", Errc::config,
          "transport '", options.kind, "' is not one of auto, shm, tcp");
  require(options.sockets >= 1 && options.sockets <= 16, Errc::config, options.sockets,
          " sockets a link are not 1 to 16");
}

/// The transports of one rank, before they are connected.
struct Transports {
  std::unique_ptr<ShmTransport> shm;  ///< null if no two ranks of the group share memory
  std::unique_ptr<TcpTransport> tcp;  ///< null if all do
};

/// Exchanges the addresses of the ranks and connects with all peers.
void connect_all(const Transports& transports, const net::HandshakeInfo& me, LinkMonitor& monitor,
                 Store& store, Deadline deadline) {
  const auto& [shm, tcp] = transports;
  const std::string mine = concat(shm ? shm->address() : "", ' ', tcp ? tcp->address() : "");
  std::vector<std::string> shm_addresses, tcp_addresses;
  for (const auto& entry : store_all_gather(me.rank, me.size, store, "address", mine, deadline)) {
    const auto space = std::min(entry.find(' '), entry.size());
    shm_addresses.push_back(entry.substr(0, space));
    tcp_addresses.push_back(entry.substr(std::min(space + 1, entry.size())));
  }
  if (shm) shm->connect(me, shm_addresses, deadline);
  if (tcp) tcp->connect(me, tcp_addresses, deadline);
  if (me.size > 1) await_connected(me.rank, me.size, store, deadline, [&] { monitor.progress(); });
}

}  // namespace

// Frames to a peer are striped over its sockets, and all sockets of a host share its network. With more
// sockets, every frame takes longer, and so do all transfers that depend on it.
int sockets_per_peer(std::span<const int> hosts, int wanted) {
  std::ptrdiff_t sharing = 1;
  for (const int host : hosts) sharing = std::max(sharing, std::count(hosts.begin(), hosts.end(), host));
  return std::max(1, wanted / static_cast<int>(sharing));
}

std::unique_ptr<Transport> connect_transport(int rank, int size, Store& store,
                                             const TransportOptions& options, Deadline deadline) {
  std::string tuning;
  return connect_transport(rank, size, store, options, deadline, tuning);
}

// A group on one host has shared memory alone, one of a rank per host TCP alone, others have both; a rank
// that is alone on its host then has no peer in shared memory.
std::unique_ptr<Transport> connect_transport(int rank, int size, Store& store,
                                             const TransportOptions& options, Deadline deadline,
                                             std::string& tuning) {
  check_arguments(rank, size, options);
  const PeerInfo peer_info = exchange_peer_info(rank, size, store, options, deadline);
  tuning = peer_info.tuning;
  const std::vector<int> hosts = number_hosts(peer_info, options.kind);
  const auto [near, far] = peers_of(rank, hosts);
  require(options.kind != "shm" || far.empty(), Errc::config, "transport 'shm', but rank ",
          net::list_ranks(far), " is not on the host of rank ", rank, "; use 'auto' or 'tcp'");
  const std::vector<int> here = with_self(near, rank);
  const auto monitor = std::make_shared<LinkMonitor>(
      rank, hosts, std::any_of(here.begin(), here.end(), [&](int r) { return peer_info.oversubscribed(r); }));
  const int host_count = 1 + *std::max_element(hosts.begin(), hosts.end());
  Transports transports;
  if (host_count < size || host_count == 1)
    transports.shm = std::make_unique<ShmTransport>(
        monitor, here, near.empty() ? 0 : staging_ring_bytes(caches(), here.size()), options.memory);
  if (host_count > 1)
    transports.tcp = std::make_unique<TcpTransport>(
        monitor, far,
        TcpOptions{sockets_per_peer(hosts, options.sockets), options.congestion,
                   listen_address(peer_info, options, store)});
  try {
    const auto check = [&] { throw_published_failure(rank, store); };
    connect_all(transports, {peer_info.job_id, rank, size, {}, check}, *monitor, store, deadline);
  } catch (const Error& e) {
    if (e.culprit() >= 0) throw_published_failure(rank, store);
    throw;
  }
  auto& [shm, tcp] = transports;
  if (!tcp) return std::move(shm);
  if (!shm) return std::move(tcp);
  auto group = std::make_unique<GroupTransport>(monitor);
  group->add(std::move(shm), near);
  group->add(std::move(tcp), far);
  return group;
}

}  // namespace rz
