#pragma once
/// TCP addresses and sockets, IPv4 and IPv6.

#include <sys/socket.h>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "comm/core/deadline.h"
#include "comm/os/fd.h"

namespace rz::net {

struct HostPort {
  std::string host;
  int port = 0;
};
/// Parses "host:port", "1.2.3.4:port" or "[::1]:port". Errc::config describes the error.
HostPort parse_host_port(const std::string&);
/// Inverse of parse_host_port(): puts brackets around an IPv6 address.
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

/// All addresses of a host name or numeric address. Errc::rendezvous names the host and the resolver's error.
std::vector<SocketAddress> resolve(const HostPort&);

struct Interface {
  std::string name;
  SocketAddress address;
  /// Whether `text` is its name or address, or a prefix of the address that ends at a separator ("10.0.0.1",
  /// "10.0" and "10.0." are 10.0.0.1; "10.0.0.1" is also 10.0.0.1%eth0), or empty.
  bool has_name(const std::string& text) const;
};
/// The addresses of all interfaces that are up, IPv4 first.
std::vector<Interface> interfaces();

/// A non-blocking listener, bound to exactly this address. Port 0 selects a free port. Errc::system names the
/// address.
UniqueFd listen_tcp(const SocketAddress&);
/// Like listen_tcp(), but returns an empty descriptor if the port is in use.
UniqueFd listen_tcp_if_free(const SocketAddress&);
/// Connections that a server accepts before it reads from those that it has. The reads authenticate clients
/// that have sent their hello, so that later connections cannot evict them.
inline constexpr int max_accepts_per_poll = 32;
/// Starts a connection and returns the non-blocking socket, still connecting, with set_tcp_options() applied.
/// `congestion`: see set_congestion_control(). Errc::rendezvous if the connection fails at once.
UniqueFd start_connect(const SocketAddress&, const std::string& congestion = "system");
/// Connects and returns the non-blocking socket, with set_tcp_options() applied. On failure it is empty, and
/// errno is set. A self-connection counts as ECONNREFUSED: if there is no listener, the kernel may assign the
/// socket the very port that it connects to.
UniqueFd connect_tcp(const SocketAddress&, Deadline);
/// A listener whose queue strangers fill drops the first packet of a connection, which its sender repeats
/// only after 1 s, 2 s and so on. So a connection is begun anew some times, for as long as an answer of a
/// near host takes (half of the time until the deadline at most), and then awaited.
inline constexpr int soon_tries = 8;
inline constexpr std::chrono::milliseconds time_of_soon_try{100};
/// As connect_tcp(), in such tries.
UniqueFd connect_in_tries(const SocketAddress&, Deadline);
/// The address that the socket is bound to.
SocketAddress local_address(int socket);
bool is_unix_socket(int socket);
/// Whether the connection may pass a network: its ends have different addresses, of which one is not
/// loopback.
bool leaves_host(int socket);
/// Sets TCP_NODELAY, and keep-alive probes that detect a dead host after about ten seconds of silence.
void set_tcp_options(int socket);
/// Sets TCP_USER_TIMEOUT: the connection fails if sent data stays unacknowledged for this long. Keep-alive
/// does not probe meanwhile. Not for data sockets: a live peer that reads nothing for so long would be lost.
void limit_unacknowledged(int socket, std::chrono::milliseconds);
/// How long ago the other host has acknowledged anything, if data is on its way to it now. One whose program
/// reads nothing acknowledges that it has no room.
std::optional<std::chrono::milliseconds> unacknowledged(int socket);
/// Sets TCP_NOTSENT_LOWAT: the socket is writable only while fewer than `bytes` bytes are unsent.
void limit_unsent(int socket, int bytes);

/// Sets the congestion control algorithm; "system" changes nothing. Call it before the socket connects or
/// listens; accepted connections inherit it. Errc::config if this host lacks the algorithm or does not permit
/// it.
void set_congestion_control(int socket, const std::string& name);
/// The socket's congestion control algorithm; empty if the kernel does not report it.
std::string congestion_control(int socket);

}  // namespace rz::net
