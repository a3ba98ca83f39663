#pragma once
/// Waiting of a transport: for descriptors, for the doorbell, and for changes of shared memory.

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <utility>

#include "comm/core/deadline.h"
#include "comm/net/poller.h"
#include "comm/os/spin.h"
#include "comm/os/wait_policy.h"

namespace rz {

/// One thread at a time polls and waits; any thread may wake it.
class TransportWaiter {
 public:
  explicit TransportWaiter(const TransportWaitPolicy& policy) : policy_(policy) {}

  net::Poller& poller() { return poller_; }
  /// From now on poll() always polls, and wait() spins on the sockets, too.
  void expect_data_on_sockets() { data_on_sockets_ = true; }

  /// Makes wait() return. Any thread.
  void wake() noexcept {
    woken_.store(true, std::memory_order_seq_cst);
    ring_doorbell();
  }
  /// Ends a sleep in wait(). Any thread.
  void ring_doorbell() noexcept { net::Poller::ring_doorbell(poller_.doorbell()); }

  /// Polls the descriptors without sleeping. Returns false if it did not, since the last poll was less than
  /// failure_poll_interval ago: sockets that carry no data only show which peers died.
  bool poll();

  /// Returns after an event on a descriptor, after wake(), once has_event() is true, or after `timeout`.
  /// `eager`: spins before it sleeps. set_sleeping(true) makes peers that change shared memory ring the
  /// doorbell.
  template <class HasEvent, class SetSleeping>
  void wait(std::chrono::microseconds timeout, bool eager, HasEvent has_event, SetSleeping set_sleeping) {
    const auto ready = [&] { return was_woken() || has_event(); };
    if (std::exchange(event_pending_, false) || ready()) return;
    if (spin(eager, ready)) return;
    set_sleeping(true);
    if (!ready()) poller_.poll(std::min<std::chrono::microseconds>(timeout, policy_.max_sleep));
    end_sleep(set_sleeping);
  }

  /// The part of wait() before a sleep on the poller's descriptor. False: something has changed. Otherwise
  /// end_sleep() must follow.
  template <class HasEvent, class SetSleeping>
  bool begin_sleep(HasEvent has_event, SetSleeping set_sleeping) {
    if (std::exchange(event_pending_, false) || was_woken() || has_event()) return false;
    set_sleeping(true);
    if (!was_woken() && !has_event()) return true;
    end_sleep(set_sleeping);
    return false;
  }
  template <class SetSleeping>
  void end_sleep(SetSleeping set_sleeping) {
    set_sleeping(false);
    next_poll_ = {};
  }

 private:
  bool was_woken() { return woken_.load() && woken_.exchange(false); }
  // These return true after an event. An eager thread spins.
  template <class Ready>
  bool spin(bool eager, Ready ready) {
    if (eager && data_on_sockets_) return spin_on_sockets(ready);
    if (eager && policy_.memory_spins > 0) return spin_on_memory(ready);
    for (int i = 0; i < policy_.yields; ++i) {
      sched_yield();
      if (ready() || (data_on_sockets_ && poller_.poll({}))) return true;
    }
    return false;
  }
  template <class Ready>
  bool spin_on_memory(Ready ready) {
    for (int i = 0; i < policy_.memory_spins; ++i, cpu_pause())
      if (ready()) return true;
    return false;
  }
  template <class Ready>
  bool spin_on_sockets(Ready ready) {
    const auto end = Deadline::Clock::now() + policy_.socket_spin;
    do {
      if (policy_.yields_between_polls) sched_yield();
      for (int i = 0; i < policy_.pauses_per_poll; ++i, cpu_pause())
        if (ready()) return true;
      if (poller_.poll({})) return true;
    } while (Deadline::Clock::now() < end);
    return false;
  }

  const TransportWaitPolicy policy_;
  net::Poller poller_;
  bool data_on_sockets_ = false;
  bool event_pending_ = false;  // poll() saw an event, so the next wait() returns at once
  Deadline::Clock::time_point next_poll_{};
  std::atomic<bool> woken_{false};
};

inline bool TransportWaiter::poll() {
  if (!data_on_sockets_) {
    const auto now = Deadline::Clock::now();
    if (now < next_poll_) return false;
    next_poll_ = now + policy_.failure_poll_interval;
  }
  event_pending_ |= poller_.poll({});
  return true;
}

}  // namespace rz
