#pragma once
/// Time of the phases of an update: wall_clock_breakdown of DeepSpeed.

#include <array>
#include <chrono>
#include <cstddef>

#include "comm/device/stream.h"

namespace rz {

enum class Phase { forward, backward, step };

/// Sums of seconds since reset().
class PhaseTimes {
 public:
  /// Disabled, it does nothing.
  explicit PhaseTimes(bool enabled) : enabled_(enabled) {}
  bool enabled() const { return enabled_; }

  /// The time since the last call, or since reset(), belongs to a phase. On a device this waits for the
  /// stream: updates are slower while they are measured.
  void end(Phase phase, const Stream& stream) {
    if (!enabled_) return;
    stream.synchronize();
    const Clock::time_point now = Clock::now();
    seconds_[static_cast<std::size_t>(phase)] += std::chrono::duration<double>(now - last_).count();
    last_ = now;
  }
  double seconds(Phase phase) const { return seconds_[static_cast<std::size_t>(phase)]; }
  void reset() {
    seconds_ = {};
    last_ = Clock::now();
  }

 private:
  using Clock = std::chrono::steady_clock;
  bool enabled_;
  std::array<double, 3> seconds_{};
  Clock::time_point last_ = Clock::now();
};

}  // namespace rz
