#pragma once
/// TCP addresses and sockets, IPv4 and IPv6.

#include <sys/socket.h>

#include <chrono>
#include <string>
#include <vector>

#include "comm/core/deadline.h"
#include "comm/os/fd.h"

namespace rz {

struct HostPort {
  std::string host;
  int port = 0;
};
/// "host:port", "1.2.3.4:port" or "[::1]:port". Errc::config says what is wrong with the text.
HostPort parse_host_port(const std::string&);
/// The inverse: brackets around IPv6.
std::string join_host_port(const std::string& host, int port);

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t size = 0;

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
  std::string host() const;  ///< numeric, with the scope of a link-local IPv6 address
  int port() const;
  void set_port(int);
  std::string text() const { return join_host_port(host(), port()); }
  bool loopback() const;
};

/// Every address of a name or number. Errc::rendezvous names the host and the resolver's reason.
std::vector<SocketAddress> resolve(const HostPort&);

struct Interface {
  std::string name;
  SocketAddress address;
};
/// Those that are up and have an address, IPv4 first.
std::vector<Interface> interfaces();

/// Bound to exactly this address, never to all; port 0 takes a free one. Non-blocking.
UniqueFd listen_tcp(const SocketAddress&);
/// The same; empty if the port is taken.
UniqueFd listen_tcp_if_free(const SocketAddress&);
/// Connections that a server accepts before it reads those that it has. A client that has sent its hello is
/// then no stranger, whom a later one could replace.
inline constexpr int max_accepts_per_poll = 32;
/// Non-blocking, still connecting; TCP_NODELAY. `congestion`: see set_congestion_control().
UniqueFd start_connect(const SocketAddress&, const std::string& congestion = "system");
/// Connected or empty, with errno set. ECONNREFUSED too where nobody listens and the kernel has given the
/// socket the very port that it calls, which connects it with itself.
UniqueFd connect_tcp(const SocketAddress&, Deadline);
SocketAddress local_address(int socket);
/// TCP_NODELAY, and keep-alive probes that find a dead host within about ten seconds of silence.
void set_tcp_options(int socket);
/// A peer that has not acknowledged what was sent by then is lost (keep-alive does not probe meanwhile). Not
/// for data: a live peer that reads nothing for so long would be lost, too.
void limit_unacknowledged(int socket, std::chrono::milliseconds);
/// A socket takes no more bytes while so many have not been sent yet.
void limit_unsent(int socket, int bytes);

/// To be called before the socket connects or listens; accepted connections inherit it. "system" changes
/// nothing. Any other name is set; Errc::config if this host does not have it, or does not permit it.
void set_congestion_control(int socket, const std::string& name);
/// Of this socket; empty if the kernel does not say.
std::string congestion_control(int socket);

}  // namespace rz
