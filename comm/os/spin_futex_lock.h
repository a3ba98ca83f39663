#pragma once
/// Mutex for mostly uncontended use. lock() is one atomic exchange, unlock() one store and one load;
/// std::mutex takes two exchanges and two calls. Not fair.

#include <atomic>
#include <cstdint>

namespace rz {

/// Lockable, for std::unique_lock and std::condition_variable_any.
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

  std::atomic<std::uint32_t> held_{0}, sleepers_{0};  // sleepers_: threads in wait()
};

}  // namespace rz
