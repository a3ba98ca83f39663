#include "comm/net/socket.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <memory>

#include "comm/core/environment.h"
#include "comm/core/error.h"

namespace rz::net {

HostPort parse_host_port(const std::string& text) {
  const auto bad = [&](const char* why) {
    fail(Errc::config, "address '", text, "': ", why, "; expected host:port, 1.2.3.4:port or [::1]:port");
  };
  const auto colon = text.rfind(':');
  if (colon == std::string::npos) bad("no port");
  HostPort result{text.substr(0, colon), 0};
  if (result.host.size() > 1 && result.host.front() == '[' && result.host.back() == ']')
    result.host = result.host.substr(1, result.host.size() - 2);
  else if (result.host.find(':') != std::string::npos)
    bad("an IPv6 address needs brackets");
  if (result.host.empty()) bad("no host");
  const char *begin = text.data() + colon + 1, *end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(begin, end, result.port);
  if (error != std::errc{} || stop != end || result.port < 0 || result.port > 65535)
    bad("the port is not a number from 0 to 65535");
  return result;
}

std::string join_host_port(const std::string& host, int port) {
  return host.find(':') == std::string::npos ? concat(host, ':', port) : concat('[', host, "]:", port);
}

std::string SocketAddress::host() const {
  char text[NI_MAXHOST] = "?";
  getnameinfo(get(), size, text, sizeof text, nullptr, 0, NI_NUMERICHOST);
  return text;
}

int SocketAddress::port() const {
  if (storage.ss_family == AF_INET6) return ntohs(reinterpret_cast<const sockaddr_in6&>(storage).sin6_port);
  return ntohs(reinterpret_cast<const sockaddr_in&>(storage).sin_port);
}

void SocketAddress::set_port(int port) {
  const auto value = htons(static_cast<std::uint16_t>(port));
  if (storage.ss_family == AF_INET6)
    reinterpret_cast<sockaddr_in6&>(storage).sin6_port = value;
  else
    reinterpret_cast<sockaddr_in&>(storage).sin_port = value;
}

bool SocketAddress::loopback() const {
  if (storage.ss_family == AF_INET6)
    return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6&>(storage).sin6_addr);
  return ntohl(reinterpret_cast<const sockaddr_in&>(storage).sin_addr.s_addr) >> 24 == 127;
}

std::vector<SocketAddress> resolve(const HostPort& where) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  const int error = getaddrinfo(where.host.c_str(), std::to_string(where.port).c_str(), &hints, &list);
  require(error == 0, Errc::rendezvous, "getaddrinfo of '", where.host, "': ", gai_strerror(error),
          "; check the name, and that this host can resolve it");
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(list, freeaddrinfo);
  std::vector<SocketAddress> addresses;
  for (const addrinfo* a = list; a; a = a->ai_next) {
    SocketAddress address;
    std::memcpy(&address.storage, a->ai_addr, a->ai_addrlen);
    address.size = a->ai_addrlen;
    addresses.push_back(address);
  }
  return addresses;
}

std::vector<Interface> interfaces() {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) fail_errno("getifaddrs");
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(list, freeifaddrs);
  std::vector<Interface> found;
  for (const ifaddrs* i = list; i; i = i->ifa_next) {
    if (!i->ifa_addr || !(i->ifa_flags & IFF_UP)) continue;
    const int family = i->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    Interface interface {
      i->ifa_name, {}
    };
    interface.address.size = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    std::memcpy(&interface.address.storage, i->ifa_addr, interface.address.size);
    found.push_back(interface);
  }
  std::stable_partition(found.begin(), found.end(),
                        [](const Interface& i) { return i.address.storage.ss_family == AF_INET; });
  return found;
}

bool Interface::has_name(const std::string& text) const {
  const std::string host = address.host();
  if (text.empty() || text == name) return true;
  if (!host.starts_with(text)) return false;
  const auto separates = [](char c) { return c == '.' || c == ':' || c == '%'; };
  return host.size() == text.size() || separates(text.back()) || separates(host[text.size()]);
}

UniqueFd listen_tcp(const SocketAddress& address) {
  UniqueFd socket = listen_tcp_if_free(address);
  if (!socket) fail_errno("bind", address.text() + " (a free port?)");
  return socket;
}

namespace {

/// Empty if the port is in use.
UniqueFd listen_at_port(const SocketAddress& address) {
  UniqueFd socket(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket) fail_errno("socket", "for " + address.text());
  const int on = 1;
  setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (bind(socket.get(), address.get(), address.size) != 0 || listen(socket.get(), 1024) != 0) {
    if (errno != EADDRINUSE) fail_errno("bind", address.text() + " (an address of this host?)");
    socket.close();
    errno = EADDRINUSE;
  }
  return socket;
}

}  // namespace

UniqueFd listen_tcp_if_free(const SocketAddress& address) {
  const PortRange& ports = environment().ports;
  if (address.port() != 0 || ports.first == 0) return listen_at_port(address);
  SocketAddress one = address;
  for (int i = 0; i < ports.size(); ++i) {  // processes of a host begin with different ones
    one.set_port(ports.at(static_cast<int>(::getpid()), i));
    if (UniqueFd socket = listen_at_port(one)) return socket;
  }
  fail(Errc::rendezvous, "listen at ", address.host(), ": none of the ports RZ_PORTS=", ports.first, "-",
       ports.last, " is free; give more of them");
}

UniqueFd start_connect(const SocketAddress& address, const std::string& congestion) {
  UniqueFd socket(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket) fail_errno("socket", "for " + address.text());
  set_congestion_control(socket.get(), congestion);
  if (connect(socket.get(), address.get(), address.size) != 0 && errno != EINPROGRESS)
    fail(Errc::rendezvous, "connect to ", address.text(), ": ", std::strerror(errno),
         "; is the address reachable from this host (RZ_INTERFACE chooses another)?");
  set_tcp_options(socket.get());
  return socket;
}

namespace {

bool is_self_connected(int socket) {
  const SocketAddress here = local_address(socket);
  SocketAddress there;
  there.size = sizeof there.storage;
  return getpeername(socket, there.get(), &there.size) == 0 && here.text() == there.text();
}

/// Closes with a reset, which skips TIME_WAIT: the port is free at once.
void close_with_reset(UniqueFd& socket) {
  const linger at_once{1, 0};
  setsockopt(socket.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
  socket.close();
}

}  // namespace

UniqueFd connect_tcp(const SocketAddress& address, Deadline deadline) {
  UniqueFd socket(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket) fail_errno("socket", "for " + address.text());
  if (connect(socket.get(), address.get(), address.size) != 0) {
    if (errno != EINPROGRESS) return {};
    pollfd p{socket.get(), POLLOUT, 0};
    int ready = 0;
    do ready = poll(&p, 1, deadline.poll_ms(60'000));
    while (ready < 0 && errno == EINTR);
    int error = ETIMEDOUT;
    socklen_t size = sizeof error;
    if (ready > 0) getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &size);
    if (error) {
      socket.close();
      errno = error;
      return {};
    }
  }
  if (is_self_connected(socket.get())) {
    close_with_reset(socket);
    errno = ECONNREFUSED;
    return {};
  }
  set_tcp_options(socket.get());
  return socket;
}

UniqueFd connect_in_tries(const SocketAddress& address, Deadline deadline) {
  const Deadline soon = Deadline::after(
      std::min<Deadline::Clock::duration>(soon_tries * time_of_soon_try, deadline.remaining() / 2));
  while (!soon.expired()) {
    UniqueFd socket = connect_tcp(address, Deadline::after(time_of_soon_try));
    if (socket || errno != ETIMEDOUT) return socket;
  }
  return connect_tcp(address, deadline);
}

SocketAddress local_address(int socket) {
  SocketAddress address;
  address.size = sizeof address.storage;
  if (getsockname(socket, address.get(), &address.size) != 0) fail_errno("getsockname");
  return address;
}

bool is_unix_socket(int socket) {
  int domain = 0;
  socklen_t size = sizeof domain;
  return getsockopt(socket, SOL_SOCKET, SO_DOMAIN, &domain, &size) == 0 && domain == AF_UNIX;
}

bool leaves_host(int socket) {
  SocketAddress here, there;
  here.size = there.size = sizeof here.storage;
  if (getsockname(socket, here.get(), &here.size) != 0 || getpeername(socket, there.get(), &there.size) != 0)
    return true;
  return here.host() != there.host() && !(here.loopback() && there.loopback());
}

void set_tcp_options(int socket) {
  const int on = 1, idle = 4, interval = 2, probes = 3;
  setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  setsockopt(socket, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  setsockopt(socket, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
  setsockopt(socket, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof interval);
  setsockopt(socket, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
}

void limit_unacknowledged(int socket, std::chrono::milliseconds limit) {
  const auto ms = static_cast<unsigned>(limit.count());
  setsockopt(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, &ms, sizeof ms);
}

std::optional<std::chrono::milliseconds> unacknowledged(int socket) {
  tcp_info info{};
  socklen_t size = sizeof info;
  if (getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &size) != 0 || info.tcpi_unacked == 0) return {};
  return std::chrono::milliseconds(info.tcpi_last_ack_recv);
}

void limit_unsent(int socket, int bytes) {
  setsockopt(socket, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &bytes, sizeof bytes);
}

std::string congestion_control(int socket) {
  char name[16] = {};
  socklen_t size = sizeof name;
  if (getsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, name, &size) != 0) return {};
  return {name, strnlen(name, sizeof name)};
}

void set_congestion_control(int socket, const std::string& name) {
  if (name == "system") return;
  const auto size = static_cast<socklen_t>(name.size());
  const bool set = setsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, name.data(), size) == 0;
  require(set, Errc::config, "RZ_CONGESTION='", name, "': ", std::strerror(errno),
          "; /proc/sys/net/ipv4/tcp_allowed_congestion_control lists the names that this host permits, and "
          "'system' changes nothing");
}

}  // namespace rz::net
