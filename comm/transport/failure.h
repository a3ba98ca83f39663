#pragma once
/// The first failure of a group.

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>

#include "comm/core/error.h"

namespace rz {

/// What the reason of a lost connection begins with where neither end is to blame. rzrun looks for it in the
/// reports of ranks.
inline constexpr std::string_view lost_link = "the connection between ";

/// The cause of a group's failure. The first failure wins, and every rank throws it.
struct Failure {
  int culprit = -1;             ///< rank, or -1 if none is at fault
  Errc code = Errc::peer_lost;  ///< peer_lost, aborted, timeout, mismatch or cancelled
  std::string reason;
  /// Of cancelled: the collectives that the rank which reports it has completed. Every rank completes these
  /// before it throws, so that what has ended on one rank ends on all.
  std::uint32_t calls = 0;
};

/// The group's failure, as this rank knows it. Thread-safe.
class FailureState {
 public:
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  /// Records the first failure; later calls do nothing. `agree` sends the failure to the peers and returns
  /// the one that the group has agreed on. It runs once at most, under the lock.
  template <class Agree>
  void record(const Failure& failure, Agree&& agree) {
    const std::lock_guard lock(mutex_);
    if (failed()) return;
    failure_ = agree(failure);
    failed_.store(true, std::memory_order_release);
  }
  /// Runs f while no other thread records a failure.
  template <class F>
  void exclude(const F& f) {
    const std::lock_guard lock(mutex_);
    f();
  }
  // These require failed().
  const Failure& failure() const { return failure_; }
  [[noreturn]] void raise() const { throw Error(failure_.code, failure_.reason, failure_.culprit); }

 private:
  std::mutex mutex_;
  std::atomic<bool> failed_{false};
  Failure failure_;  // written before failed_ is set
};

}  // namespace rz
