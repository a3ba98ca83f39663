#include "comm/transport/group/group_transport.h"

#include <algorithm>
#include <utility>

#include "comm/core/text.h"

namespace rz {

void GroupTransport::add(std::unique_ptr<MonitoredTransport> transport, std::span<const int> peers) {
  for (const int peer : peers) by_rank_[static_cast<std::size_t>(peer)] = transport.get();
  transports_.push_back(std::move(transport));
}

std::string GroupTransport::address() const {
  std::string all;
  for (const auto& t : transports_) all += concat(&t == &transports_.front() ? "" : " ", t->address());
  return all;
}

void GroupTransport::connect(const net::HandshakeInfo& me, const std::vector<std::string>& addresses,
                             Deadline deadline) {
  std::vector<std::string> rest = addresses;
  for (const auto& t : transports_) {
    std::vector<std::string> of_transport;
    for (std::string& address : rest) {
      const auto end = std::min(address.find(' '), address.size());
      of_transport.push_back(address.substr(0, end));
      address.erase(0, end + 1);
    }
    t->connect(me, of_transport, deadline);
  }
}

SharedMemoryGroup* GroupTransport::shared_memory() {
  for (auto& t : transports_)
    if (auto* const shared = t->shared_memory()) return shared;
  return nullptr;
}

std::string GroupTransport::describe() const {
  std::string names;
  for (const auto& t : transports_) names += concat(names.empty() ? "" : "+", t->describe());
  return names;
}

}  // namespace rz
