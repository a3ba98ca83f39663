#pragma once
/// How updates treat each member.

#include <cstdint>
#include <span>
#include <vector>

#include "sharding/model/partition.h"
#include "sharding/optim/unused_parameters.h"
#include "sharding/strategy/pass_rules.h"

namespace rz {

/// Decides which members an update skips, and counts the updates that each has missed.
class MemberUpdates {
 public:
  /// `members`: their number. `used`: the members used in the passes since zero_grad(); must outlive this
  /// object.
  MemberUpdates(std::size_t members, UnusedParameterPolicy, const PassRules& used);

  /// `settings` with skip and missed of the next update, by member; valid until the next call.
  std::span<const MemberUpdate> decide(std::span<const MemberUpdate> settings);
  /// Call after an update that was not skipped.
  void count_missed();
  /// Updates that skipped a member, by member.
  std::span<const std::int64_t> missed() const { return missed_; }
  void set_missed(int member, std::int64_t updates) { missed_[static_cast<std::size_t>(member)] = updates; }

 private:
  bool skipped(std::size_t member) const;

  UnusedParameterPolicy policy_;
  const PassRules& used_;
  std::vector<std::int64_t> missed_;
  std::vector<MemberUpdate> updates_;  // kept so that an update allocates nothing
};

}  // namespace rz
