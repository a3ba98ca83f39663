#include "comm/transport/group/group_transport.h"

#include <utility>

#include "comm/core/text.h"

namespace rz {

void GroupTransport::add(std::unique_ptr<Transport> transport, std::span<const int> peers) {
  for (const int peer : peers) by_rank_[static_cast<std::size_t>(peer)] = transport.get();
  transports_.push_back(std::move(transport));
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
