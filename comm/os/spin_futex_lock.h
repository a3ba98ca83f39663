#pragma once
/// A mutex that mostly one thread enters: one atomic exchange, one store and one look, where std::mutex takes
/// two exchanges and two calls. Unfair, as that is.

#include <atomic>
#include <cstdint>

namespace rz {

/// What std::unique_lock and std::condition_variable_any take.
class SpinFutexLock {
 public:
  void lock() noexcept {
    if (held_.exchange(1, std::memory_order_acquire)) wait();
  }
  bool try_lock() noexcept { return !held_.exchange(1, std::memory_order_acquire); }
  void unlock() noexcept {
    held_.store(0, std::memory_order_release);
    if (sleepers_.load(std::memory_order_relaxed)) wake();
  }

 private:
  void wait() noexcept;
  void wake() noexcept;

  std::atomic<std::uint32_t> held_{0}, sleepers_{0};  // waiting_: threads that sleep, or are about to
};

}  // namespace rz
