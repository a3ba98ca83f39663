#pragma once
/// What the threads of a progress engine have seen lately, from which they derive how long to poll and sleep.

#include <chrono>
#include <optional>

#include "comm/os/wait_policy.h"

namespace rz {

/// How long no call has progressed on the driving threads. Used with the progress token.
class IdleTime {
 public:
  using Time = std::chrono::steady_clock::time_point;

  /// True at every 64th step with progress, when failures and deadlines are to be polled.
  bool progressed() {
    since_.reset(), may_sleep_ = false;
    return ++steps_ % 64 == 0;
  }
  void idle(Time now, const ProgressWaitPolicy& policy) {
    if (!since_) since_ = now;
    may_sleep_ = now - *since_ >= policy.spin_limit;
  }
  /// No call has progressed for ProgressWaitPolicy::spin_limit.
  bool may_sleep() const { return may_sleep_; }

 private:
  unsigned steps_ = 0;  // with progress
  std::optional<Time> since_;
  bool may_sleep_ = false;
};

/// When calls were made, and whether threads waited for them: the progress thread's view. Used with the
/// engine's mutex.
struct PollSchedule {
  using Time = std::chrono::steady_clock::time_point;

  Time last_use{};         ///< of submit()
  Time last_unattended{};  ///< last time that no thread waited for a request
  Time last_poll{};        ///< of failures, while no thread drives
  bool asleep = false;     ///< a submission must wake the thread: there was none for active_window

  bool is_active(Time now, const ProgressWaitPolicy& policy) const {
    return now - last_use < policy.active_window;
  }
  /// When an active thread looks for requests next: at a multiple of the period, so that it does so for all
  /// communicators at once.
  Time next_look(Time now, const ProgressWaitPolicy& policy) const {
    const auto period = now - last_unattended < policy.active_window ? policy.active_poll : policy.idle_poll;
    return Time((now.time_since_epoch() / period + 1) * period);
  }
};

}  // namespace rz
