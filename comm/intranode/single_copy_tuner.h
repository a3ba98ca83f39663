#pragma once
/// Which of two ways calls of one kind take, by how long they took: staged (copied into a ring and out of it)
/// or once (copied once, by the kernel). Which is the faster depends on how far apart the processors are that
/// the ranks run on, and they move by the second: so both are tried again and again.
///
/// Calls go round: four copy once, four stage (the first of each find caches full of what the other needed),
/// then all ranks choose by everybody's times, and some more calls, the more the less the choice changes,
/// take what was chosen. Every rank counts the same calls and hears the same times, so all choose alike.

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace rz {

class SingleCopyTuner {
 public:
  using Duration = std::chrono::nanoseconds;
  /// The shortest of one rank's trials.
  struct Times {
    std::uint32_t single_copy_ns = 0, staged_ns = 0;
    bool operator==(const Times&) const = default;
  };

  bool enabled() const { return enabled_; }
  void enable() { *this = {}, enabled_ = true; }
  void disable() { *this = {}; }

  /// The next call, while on(). Whether ranks have to tell each other where its memory lies.
  bool begin_call() {
    if (call_ > 2 * samples + hold_) call_ = 0, own_times_ = {};
    const unsigned now = call_++;
    return now < samples || now == 2 * samples || (now > 2 * samples && prefers_single_copy_);
  }
  /// Of that call: it is a trial, and has to be ended with took().
  bool is_sample() const { return call_ <= 2 * samples; }
  /// It is the one at which ranks choose.
  bool is_decision() const { return call_ == 2 * samples + 1; }
  void record(Duration);
  Times own_times() const { return own_times_; }
  /// By the sums of all ranks' times.
  void decide(std::uint64_t single_copy_ns, std::uint64_t staged_ns);
  /// Whether the call under way copies once; it has asked.
  bool uses_single_copy() const { return call_ <= samples || prefers_single_copy_; }

  static constexpr unsigned samples = 4, min_hold = 128, max_hold = 1024;  // calls

 private:
  bool enabled_ = false, prefers_single_copy_ = false;
  unsigned call_ = 0, hold_ = 0;  // calls since the round began; after the choice
  Times own_times_;
};

inline void SingleCopyTuner::record(Duration d) {
  const auto ns = static_cast<std::uint32_t>(std::clamp<std::int64_t>(d.count(), 1, 0xffffffff));
  std::uint32_t& least = call_ <= samples ? own_times_.single_copy_ns : own_times_.staged_ns;
  if (least == 0 || ns < least) least = ns;
}

/// Not for a little: staged calls end sooner for who only sends, and need nobody's leave.
inline void SingleCopyTuner::decide(std::uint64_t single_copy_ns, std::uint64_t staged_ns) {
  const bool better = 10 * single_copy_ns < 9 * staged_ns;
  hold_ = hold_ && better == prefers_single_copy_ ? std::min(2 * hold_, max_hold) : min_hold;
  prefers_single_copy_ = better;
}

}  // namespace rz
