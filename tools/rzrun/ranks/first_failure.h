#pragma once
/// Which end of a rank was the first failure of a group.

#include <chrono>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tools/rzrun/ranks/ranks.h"

namespace rz::rzrun {

/// Decides which of the ends of ranks is the first failure, and words it, those after it and what the other
/// ranks waited for. It has no clock: the caller passes the time.
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
  /// The same, or the rank that its report blames, if that has failed by itself or was ended with the others.
  /// Requires is_known().
  const RankEnd& cause() const { return failed_[cause_]; }
  bool has_several_hosts() const { return has_several_hosts_; }
  bool is_known() const { return first_.has_value(); }

  /// When decide() would decide, or is_reported() becomes true; nothing if neither is awaited.
  std::optional<Clock::time_point> next() const;
  /// True once the other ranks have had their time to print why they end.
  bool is_reported(Clock::time_point now) const { return report_until_ && now >= *report_until_; }

  // The story of a group that has ended; each text is empty if there is nothing to tell.

  /// Of the cause, if it crashed: lines.
  std::string stack() const;
  /// "ranks 0, 1 exited with 4": those that ended in another way than the first failure, however many in a
  /// line, and lost hosts.
  std::vector<std::string> later() const;
  /// "ranks 1, 2, 3 waited in all_reduce #204 (2 f32, sum) of 'world' for rank 0": where the others were.
  std::string waits() const;
  /// "rank 3 of 4 on host n1 exited with 5: ERROR": the cause, with its report or what it was doing. "rank 2
  /// of 4 on host n1 was stopped (state T, as by SIGSTOP); rank 0 exited with 1: ERROR" of one that others
  /// blame.
  std::string line(int ranks) const;

 private:
  void report(const RankEnd&, bool is_ending, Clock::time_point now);
  std::string waited_for(const RankEnd&) const;

  bool has_several_hosts_;
  std::optional<RankEnd> first_, news_;
  std::vector<RankEnd> failed_;    // the first failure, and those after it
  std::size_t cause_ = 0;          // in failed_
  std::vector<RankEnd> suspects_;  // failures of which one will be the first
  Clock::time_point decide_at_;    // while there are some
  std::optional<Clock::time_point> report_until_;
};

}  // namespace rz::rzrun
