#include "sharding/strategy/optimizer_state_access.h"

#include "comm/core/error.h"

namespace rz {

namespace {

int trained_member(const ModelParameters& parameters, const Parameter& p) {
  const int member = parameters.member_of(p);
  require(member >= 0, Errc::invalid_argument, p.name,
          " has no optimizer state: it was frozen or not part of the model when the strategy was made");
  return member;
}

}  // namespace

std::int64_t OptimizerStateAccess::missed_updates(const Parameter& p) const {
  return members_.missed()[static_cast<std::size_t>(trained_member(parameters_, p))];
}

void OptimizerStateAccess::set_missed_updates(const Parameter& p, std::int64_t updates) {
  members_.set_missed(trained_member(parameters_, p), updates);
}

}  // namespace rz
