#include <arpa/inet.h>
#include <limits.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
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

}  // namespace

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
