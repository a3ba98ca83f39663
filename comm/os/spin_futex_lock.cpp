#include "comm/os/spin_futex_lock.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <ctime>

namespace rz {

namespace {
constexpr timespec max_futex_sleep{.tv_sec = 0, .tv_nsec = 1'000'000};
static_assert(sizeof(std::atomic<std::uint32_t>) == sizeof(std::uint32_t), "what a futex is");
}  // namespace

// unlock() has no fence between its store to held_ and its load of sleepers_, so it may read 0 while this
// thread still reads held_ == 1 (store buffering), and skip the wakeup. Two things bound the delay:
// FUTEX_WAIT reads held_ again in the kernel, by when the store is visible in practice; and a sleep lasts at
// most max_futex_sleep.
void SpinFutexLock::wait() noexcept {
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  while (held_.exchange(1, std::memory_order_acquire))
    syscall(SYS_futex, &held_, FUTEX_WAIT_PRIVATE, 1u, &max_futex_sleep, nullptr, 0);
  sleepers_.fetch_sub(1, std::memory_order_relaxed);
}

void SpinFutexLock::wake() noexcept {
  syscall(SYS_futex, &held_, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
}

}  // namespace rz
