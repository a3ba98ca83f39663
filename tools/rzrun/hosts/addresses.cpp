#include <arpa/inet.h>
#include <ifaddrs.h>
#include <limits.h>
#include <net/if.h>
#include <netinet/in.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>

#include "comm/core/text.h"
#include "tools/rzrun/hosts/hosts.h"

namespace rz::hosts {
namespace {

/// An address of IPv4 or IPv6, and how many of its bits name the network.
struct Network {
  int family = AF_UNSPEC, bits = 0;
  std::array<std::uint8_t, 16> address{};
  bool operator==(const Network&) const = default;
  bool shares_with(const Network& other) const {
    if (family != other.family || bits != other.bits) return false;
    for (int bit = 0; bit < bits; bit += 8) {
      const int unused = std::max(0, 8 - (bits - bit));
      const auto byte = static_cast<std::size_t>(bit / 8);
      if ((address[byte] ^ other.address[byte]) >> unused) return false;
    }
    return true;
  }
};

std::optional<Network> network_of(const std::string& text) {
  const auto slash = text.find('/');
  if (slash == std::string::npos) return {};
  const std::string address = text.substr(0, slash);
  const auto bits = parse_number<int>(text.substr(slash + 1));
  for (const auto& [family, length] : {std::pair(AF_INET, 32), std::pair(AF_INET6, 128)}) {
    Network n{.family = family};
    if (::inet_pton(family, address.c_str(), n.address.data()) != 1) continue;
    if (!bits || *bits < 0 || *bits > length) return {};
    n.bits = *bits;
    return n;
  }
  return {};
}

/// The bytes of an address of IPv4 or IPv6; empty for another family.
std::span<const std::uint8_t> bytes_of(const sockaddr* a) {
  if (a->sa_family == AF_INET)
    return {reinterpret_cast<const std::uint8_t*>(&reinterpret_cast<const sockaddr_in*>(a)->sin_addr), 4};
  if (a->sa_family != AF_INET6) return {};
  return {reinterpret_cast<const sockaddr_in6*>(a)->sin6_addr.s6_addr, 16};
}

}  // namespace

std::vector<std::string> own_addresses() {
  std::vector<std::string> found;
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all) != 0) return found;
  for (const ifaddrs* i = all; i; i = i->ifa_next) {
    const bool usable = (i->ifa_flags & IFF_UP) && !(i->ifa_flags & IFF_LOOPBACK);
    if (!usable || !i->ifa_addr || !i->ifa_netmask) continue;
    const auto address = bytes_of(i->ifa_addr);
    const bool is_of_link = address.size() == 16 && address[0] == 0xfe && (address[1] & 0xc0) == 0x80;
    if (address.empty() || is_of_link) continue;
    int prefix = 0;
    for (const std::uint8_t byte : bytes_of(i->ifa_netmask)) prefix += std::popcount(byte);
    char text[INET6_ADDRSTRLEN];
    ::inet_ntop(i->ifa_addr->sa_family, address.data(), text, sizeof text);
    found.push_back(concat(text, "/", prefix));
  }
  ::freeifaddrs(all);
  return found;
}

std::string own_name() {
  char name[HOST_NAME_MAX + 1] = {};
  ::gethostname(name, HOST_NAME_MAX);
  return name;
}

bool is_this_host(const std::string& name) {
  const std::string own = own_name();
  return name == "localhost" || name == "127.0.0.1" || name == own || name == own.substr(0, own.find('.'));
}

std::string master_address(const std::vector<std::vector<std::string>>& addresses) {
  std::string best;
  int best_score = -1;
  for (const int family : {AF_INET, AF_INET6}) {
    for (const std::string& text : addresses.empty() ? std::vector<std::string>() : addresses.front()) {
      const auto own = network_of(text);
      if (!own || own->family != family) continue;
      int score = 0;
      for (std::size_t node = 1; node < addresses.size(); ++node) {
        bool shares = false, is_same = false;
        for (const std::string& other : addresses[node])
          if (const auto network = network_of(other)) {
            shares = shares || own->shares_with(*network);
            is_same = is_same || *own == *network;
          }
        score += shares && !is_same;
      }
      if (score > best_score) best = text.substr(0, text.find('/')), best_score = score;
    }
  }
  return best;
}

}  // namespace rz::hosts
