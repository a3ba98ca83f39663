#pragma once
/// A value with static storage that is made at its first use; in place of a function-local static.
///
/// The guard of a function-local static makes threads wait for the one that initializes it. A child of fork()
/// inherits the guard, but not that thread, and would wait for ever. Here no thread waits for another:
/// several may make the value at once, and the first one is kept.

#include <atomic>
#include <memory>

namespace rz {

/// Declare it `static constinit`. Never destroyed: objects with static storage may use it. Thread safe.
template <class T>
class Lazy {
 public:
  constexpr Lazy() = default;
  Lazy(const Lazy&) = delete;

  /// The value; null before its first use.
  const T* find() const noexcept { return value_.load(std::memory_order_acquire); }
  /// The value, which is make() at the first use. `make` may throw; the next use then calls it again.
  template <class F>
  const T& get(const F& make) {
    if (const T* const value = find()) return *value;
    auto made = std::make_unique<const T>(make());
    const T* first = nullptr;
    return value_.compare_exchange_strong(first, made.get(), std::memory_order_acq_rel) ? *made.release()
                                                                                        : *first;
  }

 private:
  std::atomic<const T*> value_{nullptr};
};

}  // namespace rz
