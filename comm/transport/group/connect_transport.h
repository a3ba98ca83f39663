#pragma once
/// Connects the transport of a group: shared memory within a node, TCP between nodes.

#include <chrono>
#include <memory>
#include <span>
#include <string>

#include "comm/bootstrap/peer_info.h"
#include "comm/core/deadline.h"
#include "comm/store.h"
#include "comm/transport/link_monitor.h"
#include "comm/transport/transport.h"

namespace rz {

class SharedMemoryAllocator;

/// What a rank decides for itself; GroupSettings has what all ranks decide alike.
struct TransportOptions {
  /// Interface of TCP: name, address or leading numbers of the address. Empty: see choose_address().
  std::string interface;
  /// Congestion control of the TCP sockets; see set_congestion_control().
  std::string congestion = "system";
  /// How long a rank may show no sign of life; 0: for ever.
  std::chrono::milliseconds detection{10'000};
  /// Memory that this rank shares with others already, of the group that this one is split from; null: none.
  std::shared_ptr<SharedMemoryAllocator> memory;
  /// The group with which this one shares failures.
  ParentGroup parent;
};

/// Connects this rank with every other rank of the group. Every rank calls it after exchange_peer_info(),
/// with the same store. The store is not used after the return. GroupSettings::transport is "auto", where
/// each pair of ranks is connected by the first kind of transport that can, or the name of a kind, which
/// connect_transport.cpp lists. "tcp" connects ranks of one node, too, and counts every rank as a node.
/// Errors: Errc::config for another name, and for "shm" names the ranks on other nodes; Errc::timeout names
/// the ranks that did not connect; Errc::rendezvous for a connection that failed.
///
/// Failures: once a rank has died (peer_lost) or has called abort() (the code that it passed), progress()
/// throws on every rank, with the same culprit. Destroying the transport is an orderly departure. Data that
/// the departed rank has posted remains readable, and ranks that no longer need it are not affected. Posting
/// to it, finding its stream empty in peek(), or waiting for it to consume data fails the group with
/// peer_lost at the next progress().
std::unique_ptr<Transport> connect_transport(const PeerInfo&, Store&, const TransportOptions&, Deadline);

/// Number of TCP sockets per peer for collectives: `wanted` divided by the largest number of ranks on one
/// node, at least 1. `nodes`: the node of each rank (Transport::nodes()).
int sockets_per_peer(std::span<const int> nodes, int wanted);

}  // namespace rz
