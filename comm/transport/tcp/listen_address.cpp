#include "comm/transport/tcp/listen_address.h"

#include <algorithm>

#include "comm/core/error.h"

namespace rz {

namespace {

/// Whether `numbers` is the address or a prefix of it that ends at a separator: "10.0.0.1", "10.0" and
/// "10.0." match 10.0.0.1; "10.0.0.1" also matches 10.0.0.1%eth0.
bool has_address_prefix(const std::string& address, const std::string& numbers) {
  if (address.rfind(numbers, 0) != 0) return false;
  const auto separates = [](char c) { return c == '.' || c == ':' || c == '%'; };
  return address.size() == numbers.size() || separates(numbers.back()) || separates(address[numbers.size()]);
}

}  // namespace

net::SocketAddress choose_address(const std::string& interface, bool one_machine,
                                  const std::string& way_to_store) {
  const auto all = net::interfaces();
  const auto loopback = [](const net::Interface& i) { return i.address.loopback(); };
  auto chosen = all.end();
  if (!interface.empty()) {
    chosen = std::find_if(all.begin(), all.end(), [&](const net::Interface& i) {
      return i.name == interface || has_address_prefix(i.address.host(), interface);
    });
    std::string list;
    for (const auto& i : all) list += concat(list.empty() ? "" : ", ", i.name, " (", i.address.host(), ")");
    require(
        chosen != all.end(), Errc::config, "RZ_INTERFACE='", interface,
        "' is neither the name nor the address, or its first numbers, of an interface that is up; there are ",
        list);
    require(one_machine || !loopback(*chosen), Errc::config, "RZ_INTERFACE='", interface,
            "' is loopback, but the group spans several machines; there are ", list);
  } else if (one_machine) {
    chosen = std::find_if(all.begin(), all.end(), loopback);
  } else {
    chosen = std::find_if(all.begin(), all.end(), [&](const net::Interface& i) {
      return !loopback(i) && i.address.host() == way_to_store;
    });
    if (chosen == all.end()) chosen = std::find_if_not(all.begin(), all.end(), loopback);
  }
  require(chosen != all.end(), Errc::rendezvous, "no network interface that ", one_machine ? "is" : "is not",
          " loopback is up on this host; RZ_INTERFACE chooses one");
  net::SocketAddress address = chosen->address;
  address.set_port(0);
  return address;
}

}  // namespace rz
