#pragma once
/// Waiting for a value in this process to change: spin, then sleep.

#include <atomic>

namespace rz {

/// CPU hint for spin loops.
inline void cpu_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// Prefetches, for writing, a cache line that other cores have read.
inline void prefetch_for_write(const void* line) {
#if defined(__x86_64__)
  asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(line)));
#else
  __builtin_prefetch(line, 1);
#endif
}

/// Returns once `value` differs from `old`, with acquire ordering. Spins for tens of microseconds, about the
/// gap between two kernels, before it sleeps.
template <class T>
void spin_then_wait(const std::atomic<T>& value, T old) {
  for (int i = 0; i < 4000; ++i) {
    if (value.load(std::memory_order_acquire) != old) return;
    cpu_pause();
  }
  value.wait(old, std::memory_order_acquire);
}

}  // namespace rz
