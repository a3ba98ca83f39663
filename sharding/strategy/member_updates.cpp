#include "sharding/strategy/member_updates.h"

namespace rz {

MemberUpdates::MemberUpdates(std::size_t members, UnusedParameterPolicy policy, const PassRules& used)
    : policy_(policy), used_(used), missed_(members) {}

bool MemberUpdates::skipped(std::size_t member) const {
  return policy_ == UnusedParameterPolicy::pytorch && !used_.is_used(static_cast<int>(member));
}

std::span<const MemberUpdate> MemberUpdates::decide(std::span<const MemberUpdate> settings) {
  updates_.assign(settings.begin(), settings.end());
  for (std::size_t m = 0; m < missed_.size(); ++m)
    updates_[m].skip = skipped(m), updates_[m].missed = missed_[m];
  return updates_;
}

void MemberUpdates::count_missed() {
  for (std::size_t m = 0; m < missed_.size(); ++m) missed_[m] += skipped(m);
}

}  // namespace rz
