#pragma once
/// The addresses at which a server listens, from the name by which other hosts reach it.

#include <string>
#include <vector>

#include "comm/net/socket.h"

namespace rz::net {

/// The addresses of the name that are those of this host, without loopback: others may get any of them from
/// their resolver. If it has none, its first one that is not loopback, which perhaps cannot be bound; else
/// its first one. If that is only what this host means by its own name, others reach the host elsewhere, and
/// the addresses of the interfaces that `interface` names follow (Interface::has_name(); empty: all). Of
/// 0.0.0.0 and "::" they are these addresses, and loopback. Errc::rendezvous if there is no such name.
std::vector<SocketAddress> listening_addresses(const HostPort&, const std::string& interface);

/// The addresses of the interfaces that `interface` names (Interface::has_name(); empty: all), without those
/// of loopback and of one link.
std::vector<SocketAddress> reachable_addresses(const std::string& interface);

/// True for the addresses that name no host, 0.0.0.0 and "::": a client there finds its own host.
bool is_unspecified(const std::string& host);
/// True for "localhost", its variants, and addresses of loopback: other hosts mean themselves by them.
bool names_loopback(const std::string& host);

/// Listeners at this port of the first of these addresses, and of those of the others that can be bound; an
/// address of IPv6 may be tentative. Port 0 selects a free one for all. Empty if the port is in use.
std::vector<UniqueFd> listen_at(std::vector<SocketAddress> addresses, int port);

}  // namespace rz::net
