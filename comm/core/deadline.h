#pragma once
/// A point in time by which a wait must have ended. Every wait of the library takes or owns one.

#include <algorithm>
#include <chrono>

namespace rz {

/// The longest wait that is counted, some 73 years. Sums and small multiples of it fit the clock.
inline constexpr std::chrono::steady_clock::duration wait_without_end =
    std::chrono::steady_clock::duration::max() / 4;

/// `d`, at most wait_without_end. What a caller has chosen, milliseconds::max() say, goes through it before
/// it is added to anything, or compared with another unit.
template <class Rep, class Period>
constexpr std::chrono::duration<Rep, Period> bounded(std::chrono::duration<Rep, Period> d) {
  return std::min(d, std::chrono::duration_cast<std::chrono::duration<Rep, Period>>(wait_without_end));
}

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  /// No duration is too long: `milliseconds::max()` is a wait without end. A negative one is over.
  template <class Rep, class Period>
  static Deadline after(std::chrono::duration<Rep, Period> d) {
    const auto wait = std::max(bounded(d), std::chrono::duration<Rep, Period>::zero());
    return Deadline(Clock::now() + std::chrono::duration_cast<Clock::duration>(wait));
  }
  static Deadline after(Clock::duration d) { return after<Clock::rep, Clock::period>(d); }
  bool expired() const { return Clock::now() >= at_; }
  /// Never negative.
  Clock::duration remaining() const { return std::max(at_ - Clock::now(), Clock::duration::zero()); }
  /// remaining(), at most `most`, in whole milliseconds rounded up: what poll(2) takes.
  int poll_ms(int most) const {
    return static_cast<int>(
        std::min<long long>(most, std::chrono::ceil<std::chrono::milliseconds>(remaining()).count()));
  }
  /// What waits of the standard library take.
  Clock::time_point at() const { return at_; }

 private:
  explicit Deadline(Clock::time_point at) : at_(at) {}
  Clock::time_point at_;
};

}  // namespace rz
