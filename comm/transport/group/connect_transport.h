#pragma once
/// Connects the transport of a group: shared memory within a host, TCP between hosts.

#include <memory>
#include <span>
#include <string>

#include "comm/core/deadline.h"
#include "comm/store.h"
#include "comm/transport/group/transport_options.h"
#include "comm/transport/transport.h"

namespace rz {

/// Connects this rank with every other rank of the group. Every rank calls it, with the same options (see
/// exchange_peer_info()) and with a store that is fresh for the group (prefix_store()). The store is not used
/// after the return. Errors: Errc::config for invalid options; Errc::mismatch for options that differ between
/// ranks; Errc::timeout names the ranks that did not connect; Errc::rendezvous for a connection that failed.
///
/// Failures: once a rank has died (peer_lost) or has called abort() (the code that it passed), progress()
/// throws on every rank, with the same culprit. Destroying the transport is an orderly departure. Data that
/// the departed rank has posted remains readable, and ranks that no longer need it are not affected. Posting
/// to it, finding its stream empty in peek(), or waiting for it to consume data fails the group with
/// peer_lost at the next progress().
std::unique_ptr<Transport> connect_transport(int rank, int size, Store&, const TransportOptions&, Deadline);
/// As above; sets `tuning` to rank 0's tuning table.
std::unique_ptr<Transport> connect_transport(int rank, int size, Store&, const TransportOptions&, Deadline,
                                             std::string& tuning);

/// Number of TCP sockets per peer for collectives: `wanted` divided by the largest number of ranks on one
/// host, at least 1. `hosts`: the host of each rank (Transport::hosts()).
int sockets_per_peer(std::span<const int> hosts, int wanted);

}  // namespace rz
