#include <arpa/inet.h>
#include <limits.h>
#include <unistd.h>

#include <algorithm>
#include <optional>

#include "comm/core/text.h"
#include "tools/rzrun/hosts/hosts.h"

namespace rz::hosts {
namespace {

struct Network {
  std::uint32_t address = 0, mask = 0;
  bool operator==(const Network&) const = default;
  bool shares_with(const Network& other) const {
    return mask == other.mask && (address & mask) == (other.address & mask);
  }
};

std::optional<Network> network_of(const std::string& text) {
  const auto slash = text.find('/');
  in_addr address{};
  if (slash == std::string::npos || ::inet_pton(AF_INET, text.substr(0, slash).c_str(), &address) != 1)
    return {};
  const auto bits = parse_number<int>(text.substr(slash + 1));
  if (!bits || *bits < 0 || *bits > 32) return {};
  return Network{ntohl(address.s_addr), *bits ? ~std::uint32_t{0} << (32 - *bits) : 0};
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
  for (const std::string& text : addresses.empty() ? std::vector<std::string>() : addresses.front()) {
    const auto own = network_of(text);
    if (!own) continue;
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
  return best;
}

}  // namespace rz::hosts
