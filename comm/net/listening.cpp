#include "comm/net/listening.h"

#include <arpa/inet.h>

#include <algorithm>

#include "comm/core/error.h"

namespace rz::net {

std::vector<SocketAddress> listening_addresses(const HostPort& where, const std::string& interface) {
  const auto addresses = resolve(where);
  const auto own = interfaces();
  std::vector<SocketAddress> all;
  if (is_unspecified(where.host)) {  // a wildcard would be bound to other interfaces, and to later ones
    all = reachable_addresses(interface);
    for (const Interface& i : own)
      if (i.address.loopback()) all.push_back(i.address);
    if (where.host.find(':') == std::string::npos)
      std::erase_if(all, [](const SocketAddress& a) { return a.storage.ss_family != AF_INET; });
    return all;
  }
  for (const SocketAddress& a : addresses)
    if (!a.loopback() &&
        std::ranges::any_of(own, [&](const auto& i) { return i.address.host() == a.host(); }))
      all.push_back(a);
  if (!all.empty()) return all;
  auto at = std::ranges::find_if_not(addresses, &SocketAddress::loopback);
  const bool loopback = at == addresses.end();
  if (loopback) at = addresses.begin();
  all = {*at};
  for (const Interface& i : loopback && !names_loopback(where.host) ? own : std::vector<Interface>())
    if (!i.address.loopback() && i.has_name(interface)) all.push_back(i.address);
  return all;
}

bool is_unspecified(const std::string& host) {
  in_addr v4;
  in6_addr v6;
  if (::inet_aton(host.c_str(), &v4)) return v4.s_addr == 0;
  return ::inet_pton(AF_INET6, host.c_str(), &v6) == 1 && IN6_IS_ADDR_UNSPECIFIED(&v6);
}

bool names_loopback(const std::string& host) {
  for (const char* name : {"localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback"})
    if (host == name) return true;
  in_addr v4;
  in6_addr v6;
  if (::inet_pton(AF_INET, host.c_str(), &v4) == 1) return ntohl(v4.s_addr) >> 24 == 127;
  return ::inet_pton(AF_INET6, host.c_str(), &v6) == 1 && IN6_IS_ADDR_LOOPBACK(&v6);
}

std::vector<SocketAddress> reachable_addresses(const std::string& interface) {
  std::vector<SocketAddress> all;
  for (const Interface& i : interfaces()) {
    const bool is_of_link = i.address.host().find('%') != std::string::npos;
    if (!i.address.loopback() && !is_of_link && i.has_name(interface)) all.push_back(i.address);
  }
  return all;
}

std::vector<UniqueFd> listen_at(std::vector<SocketAddress> addresses, int port) {
  std::vector<UniqueFd> listeners;
  for (SocketAddress& address : addresses) {
    address.set_port(port);
    try {
      listeners.push_back(listen_tcp_if_free(address));
    } catch (const Error&) {
      if (listeners.empty()) throw;
      continue;
    }
    if (!listeners.back()) return {};
    port = local_address(listeners.back().get()).port();  // the free one that 0 has chosen
  }
  return listeners;
}

}  // namespace rz::net
