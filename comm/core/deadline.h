#pragma once
/// Deadlines. Every wait of the library has one.

#include <algorithm>
#include <chrono>

namespace rz {

/// The longest representable wait, about 73 years. Sums and small multiples of it do not overflow the clock.
inline constexpr std::chrono::steady_clock::duration wait_without_end =
    std::chrono::steady_clock::duration::max() / 4;

/// min(d, wait_without_end). Apply it to durations from callers, such as milliseconds::max(), before adding
/// them or converting their unit.
template <class Rep, class Period>
constexpr std::chrono::duration<Rep, Period> bounded(std::chrono::duration<Rep, Period> d) {
  return std::min(d, std::chrono::duration_cast<std::chrono::duration<Rep, Period>>(wait_without_end));
}

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  /// The deadline `d` from now. milliseconds::max() never expires; a negative duration has expired.
  template <class Rep, class Period>
  static Deadline after(std::chrono::duration<Rep, Period> d) {
    const auto wait = std::max(bounded(d), std::chrono::duration<Rep, Period>::zero());
    return Deadline(Clock::now() + std::chrono::duration_cast<Clock::duration>(wait));
  }
  static Deadline after(Clock::duration d) { return after<Clock::rep, Clock::period>(d); }
  bool expired() const { return Clock::now() >= at_; }
  /// Time until the deadline; 0 if it has passed.
  Clock::duration remaining() const { return std::max(at_ - Clock::now(), Clock::duration::zero()); }
  /// min(remaining(), max) in milliseconds, rounded up, for poll(2).
  int poll_ms(int max) const {
    return static_cast<int>(
        std::min<long long>(max, std::chrono::ceil<std::chrono::milliseconds>(remaining()).count()));
  }
  /// The time point, for the wait functions of the standard library.
  Clock::time_point at() const { return at_; }

 private:
  explicit Deadline(Clock::time_point at) : at_(at) {}
  Clock::time_point at_;
};

}  // namespace rz
