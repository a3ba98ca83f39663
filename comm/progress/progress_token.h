#pragma once
/// The right to progress the calls of a communicator. At most one thread holds it.

#include <atomic>

namespace rz {

/// Two kinds of threads hold the token.
///   An inline holder runs one small call in its submit(). It acquires the token by one compare-and-swap and
///   releases it by one store: it takes no lock, and it wakes no thread.
///   A driver progresses requests. It acquires and releases the token with the engine's mutex held, and
///   notifies the engine's condition variable after the release.
///
/// No thread sleeps through a release. Threads sleep only on the condition variable, and only if they have
/// read `driver` with the mutex held. The driver needs that mutex for its release, so the sleeper waits for
/// the notification by then. An inline holder becomes a driver only with the mutex held. A thread that reads
/// `inline_call` must not sleep until it is notified; it polls, for the microseconds of a small call.
class ProgressToken {
 public:
  bool try_acquire_inline() noexcept { return try_acquire(inline_call); }
  void release_inline() noexcept { state_.store(free, std::memory_order_release); }

  // These require the engine's mutex.
  bool try_acquire_driver() noexcept { return try_acquire(driver); }
  /// Turns the calling thread from the inline holder into a driver.
  void become_driver() noexcept { state_.store(driver, std::memory_order_relaxed); }
  void release_driver() noexcept { state_.store(free, std::memory_order_release); }
  bool has_driver() const noexcept { return state_.load(std::memory_order_relaxed) == driver; }

 private:
  enum State : unsigned char { free, inline_call, driver };

  bool try_acquire(State holder) noexcept {
    State expected = free;
    return state_.compare_exchange_strong(expected, holder, std::memory_order_acquire,
                                          std::memory_order_relaxed);
  }

  std::atomic<State> state_{free};
};

}  // namespace rz
