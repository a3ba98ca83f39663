#include "comm/net/listening.h"

#include <algorithm>

#include "comm/core/error.h"

namespace rz::net {

std::vector<SocketAddress> listening_addresses(const HostPort& where, const std::string& interface) {
  const auto addresses = resolve(where);
  auto at = std::ranges::find_if_not(addresses, &SocketAddress::loopback);
  const bool loopback = at == addresses.end();
  if (loopback) at = addresses.begin();
  std::vector<SocketAddress> all{*at};
  const bool is_own_name = loopback && where.host != at->host() && where.host != "localhost";
  for (const Interface& i : is_own_name ? interfaces() : std::vector<Interface>())
    if (!i.address.loopback() && i.has_name(interface)) all.push_back(i.address);
  return all;
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
