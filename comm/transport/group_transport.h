#pragma once
/// Makes the transport of a group: shared memory within a host, TCP between hosts.

#include <memory>
#include <span>
#include <string>

#include "comm/core/deadline.h"
#include "comm/store.h"
#include "comm/transport/transport.h"
#include "comm/transport/transport_options.h"

namespace rz {

/// Every rank calls it, with the same kind and number of sockets; the store must be fresh for the group
/// (prefix_store). When it returns, this rank is connected with every other and needs the store no longer.
/// Errc::timeout names the ranks that did not come.
///
/// Failures. progress() throws once any rank has died (peer_lost) or called abort() (aborted); every rank
/// throws the same culprit. A rank whose transport is destroyed in order leaves the group: what it posted can
/// still be read, and nobody is disturbed who needs it no longer. Who posts to it, finds its stream empty in
/// peek(), or waits for it to consume, fails with peer_lost at the next progress(), and then the group with
/// it.
std::unique_ptr<Transport> connect_transport(int rank, int size, Store&, const TransportOptions&, Deadline);
/// The same; `tuning` becomes rank 0's.
std::unique_ptr<Transport> connect_transport(int rank, int size, Store&, const TransportOptions&, Deadline,
                                             std::string& tuning);

/// Sockets of each link where the ranks lie on these hosts (Transport::hosts()): the ranks that share a host
/// share `wanted` of them out, by the host that most ranks share; at least one.
int sockets_per_peer(std::span<const int> hosts, int wanted);

}  // namespace rz
