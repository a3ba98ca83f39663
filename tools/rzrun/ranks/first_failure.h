#pragma once
/// Which end of a rank was the first failure of a group.

#include <chrono>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tools/rzrun/ranks/ranks.h"

namespace rz::rzrun {

/// Decides which of the ends of ranks is the first failure, and words it and those after it. It has no clock:
/// the caller passes the time.
class FirstFailure {
 public:
  using Clock = std::chrono::steady_clock;

  /// Ends of ranks on several hosts arrive in any order. One that exits because a peer is lost must not hide
  /// that peer, so there an exit is not taken for the first failure until a moment later.
  explicit FirstFailure(bool has_several_hosts) : has_several_hosts_(has_several_hosts) {}

  /// Forgets the failures: another group starts.
  void begin() { *this = FirstFailure(has_several_hosts_); }
  /// Takes the end of a rank that failed. `is_ending`: the group is being ended for another reason, so that
  /// no failure is the first one any more.
  void add(const RankEnd&, bool is_ending, Clock::time_point now);
  /// Decides, if it is time, or no rank is running any more.
  void decide(bool any_running, bool is_ending, Clock::time_point now);

  /// The first failure, once.
  std::optional<RankEnd> take() { return std::exchange(news_, {}); }
  bool has_several_hosts() const { return has_several_hosts_; }
  bool is_known() const { return first_.has_value(); }
  /// Lines about failures after the first one, each once.
  std::vector<std::string> take_later() { return std::exchange(later_, {}); }

  /// When decide() would decide, or is_reported() becomes true; nothing if neither is awaited.
  std::optional<Clock::time_point> next() const;
  /// True once the other ranks have had their time to print why they end.
  bool is_reported(Clock::time_point now) const { return report_until_ && now >= *report_until_; }

  /// Why the job failed, once more, where ranks have printed after the first failure or have left a report:
  /// the first failure, or that of the rank that its report blames. Empty if no rank failed.
  std::string story(int ranks) const;
  /// Of the same rank, if it crashed: lines for standard error. Empty: it has none.
  std::string stack() const;
  /// True if the story has more than the line of the first failure had.
  bool has_story() const;

 private:
  void report(const RankEnd&, bool is_ending, Clock::time_point now);
  const RankEnd& cause() const;

  bool has_several_hosts_;
  std::optional<RankEnd> first_, news_;
  std::vector<std::string> later_;
  std::vector<RankEnd> failed_;    // the first failure, and those after it
  std::vector<RankEnd> suspects_;  // failures of which one will be the first
  Clock::time_point decide_at_;    // while there are some
  std::optional<Clock::time_point> report_until_;
};

/// "rank 3 of 4 on host n1 failed first: exited with 5", "host n1 is lost: …".
std::string describe_first(const RankEnd&, int ranks);

}  // namespace rz::rzrun
