#pragma once
/// What a group knows of the waits of its rank in groups that are split from it and share its failures. A
/// wait there may go back to a rank that is in neither group: only the ranks of this one can find that out.

#include <map>
#include <mutex>
#include <optional>

#include "comm/transport/failure.h"
#include "comm/transport/wait_for_graph.h"

namespace rz {

/// Ranks are those of the group that others are split from. Thread-safe.
class SplitWaits {
 public:
  /// A wait that did not end in time.
  struct Expired {
    Failure failure;  ///< without a culprit
    int suspect = -1;
    RankSet waiting_on;
  };

  /// A group is split from this one.
  void add_group() {
    const std::lock_guard lock(mutex_);
    has_groups_ = true;
  }
  bool has_groups() const {
    const std::lock_guard lock(mutex_);
    return has_groups_;
  }
  /// In the group this rank has waited for long for these ranks; for none: it does not.
  void set(const void* group, const RankSet& waiting_on) {
    const std::lock_guard lock(mutex_);
    if (waiting_on.none())
      waits_.erase(group);
    else
      waits_[group] = waiting_on;
  }
  /// The ranks for which it waits in any of the groups.
  RankSet all() const {
    const std::lock_guard lock(mutex_);
    RankSet ranks;
    for (const auto& [group, waiting_on] : waits_) ranks |= waiting_on;
    return ranks;
  }
  /// The first one stays.
  void expire(const Expired& wait) {
    const std::lock_guard lock(mutex_);
    if (!expired_) expired_ = wait;
  }
  std::optional<Expired> expired() const {
    const std::lock_guard lock(mutex_);
    return expired_;
  }

 private:
  mutable std::mutex mutex_;
  bool has_groups_ = false;
  std::map<const void*, RankSet> waits_;
  std::optional<Expired> expired_;
};

}  // namespace rz
