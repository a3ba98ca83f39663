#pragma once
/// Deadlines of requests over a transport, and the culprit of one that expires.
///
/// The peer that this rank waits for may itself wait for the culprit, since schedules relay. So the wait-for
/// graph is requested shortly before the deadline; every rank that is in a call replies at once. Used with
/// the progress token.

#include <algorithm>
#include <chrono>
#include <memory>
#include <utility>

#include "comm/progress/request.h"
#include "comm/transport/link_monitor.h"
#include "comm/transport/transport.h"
#include "comm/transport/wait_for_graph.h"

namespace rz {

class Timeouts {
 public:
  using Time = std::chrono::steady_clock::time_point;

  /// `timeout`: of a request, from its submission.
  Timeouts(Transport& transport, int rank, std::chrono::milliseconds timeout)
      : transport_(transport), monitor_(transport.link_monitor()), rank_(rank), timeout_(timeout) {}

  /// Watches the deadlines of the request whose call runs and of the oldest one; either may be null. Queries
  /// all peers once a deadline is near. Returns the request to fail(), or null.
  const Request* check(Time now, const Request* current, const Request* oldest);
  /// Fails the group with Errc::timeout; `wait` is what the request waits for. Returns if that is left to the
  /// group from which this one is split.
  void fail(const Request&, const WaitState& wait);
  /// The request waits, or none if it is null: the group above is told once that is long. `waiting_on` is
  /// called only then.
  template <class Waiting>
  void poll_wait(Time now, const Request* request, const Waiting& waiting_on) {
    if (!request) return end_wait();
    if (!monitor_ || now < std::max(request->deadline - timeout_ + margin(), next_poll_)) return;
    next_poll_ = now + std::chrono::milliseconds(50);
    is_long_ = true;
    monitor_->set_long_wait(waiting_on().waiting_on);
  }
  /// No request waits.
  void end_wait() {
    if (std::exchange(is_long_, false)) monitor_->set_long_wait({});
  }
  /// The ranks for which this one waits in groups that are split from this one.
  RankSet waits_of_split_groups() const { return monitor_ ? monitor_->split_waits().all() : RankSet(); }
  /// Decides on a wait that has expired in such a group: queries all ranks, and then fails all groups.
  void poll_split_groups(Time now);

 private:
  std::chrono::steady_clock::duration margin() const;
  /// How long before a deadline the peers are queried.
  std::chrono::steady_clock::duration query_time() const;
  bool is_short() const;

  Transport& transport_;
  const std::shared_ptr<LinkMonitor> monitor_;  // null: the group has no others above and below it
  const int rank_;
  const std::chrono::milliseconds timeout_;
  Time queried_{};    // deadline of the request for which the peers were queried
  Time decide_at_{};  // when the replies are evaluated
  Time next_poll_{};
  Time split_decide_at_{};  // of poll_split_groups(), once it has queried
  bool is_long_ = false;
};

}  // namespace rz
