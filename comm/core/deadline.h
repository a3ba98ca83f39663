#pragma once
/// A point in time by which a wait must have ended. Every wait of the library takes or owns one.

#include <algorithm>
#include <chrono>

namespace rz {

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  static Deadline after(Clock::duration d) { return Deadline(Clock::now() + d); }
  bool expired() const { return Clock::now() >= at_; }
  /// Never negative.
  Clock::duration remaining() const { return std::max(at_ - Clock::now(), Clock::duration::zero()); }
  /// remaining(), at most `most`, in whole milliseconds rounded up: what poll(2) takes.
  int poll_ms(int most) const {
    return static_cast<int>(
        std::min<long long>(most, std::chrono::ceil<std::chrono::milliseconds>(remaining()).count()));
  }

 private:
  explicit Deadline(Clock::time_point at) : at_(at) {}
  Clock::time_point at_;
};

}  // namespace rz
