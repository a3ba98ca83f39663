#pragma once
/// Adaptive choice between staged (copy into the staging ring and out of it) and single-copy (CMA) for one
/// call shape. Which is faster depends on the distance between the ranks' processors, and the scheduler moves
/// ranks within seconds, so the choice is measured again and again.
///
/// One round: 4 single-copy samples, 4 staged samples (the first of each runs with cold caches, hence the
/// minimum), one call in which the ranks exchange their minima and all pick the smaller sum, then 128-1,024
/// calls of the chosen protocol, doubled each time the choice is confirmed. All ranks count the same calls
/// and see the same times, so all choose alike. Pure except for the caller's clock; not thread safe.

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace rz::intranode {

class SingleCopyTuner {
 public:
  using Duration = std::chrono::nanoseconds;
  /// One rank's minima over the samples of a round; 0: none.
  struct Times {
    std::uint32_t single_copy_ns = 0, staged_ns = 0;
    bool operator==(const Times&) const = default;
  };

  bool enabled() const { return enabled_; }
  void enable() { *this = {}, enabled_ = true; }
  void disable() { *this = {}; }

  /// Begins the next call; requires enabled(). True if the call exchanges buffer handles.
  bool begin_call() {
    if (call_ > 2 * samples + hold_) call_ = 0, own_times_ = {};
    const unsigned now = call_++;
    return now < samples || now == 2 * samples || (now > 2 * samples && prefers_single_copy_);
  }
  /// The current call is a sample: its end must be reported by record().
  bool is_sample() const { return call_ <= 2 * samples; }
  /// The current call exchanges own_times() and then calls decide().
  bool is_decision() const { return call_ == 2 * samples + 1; }
  void record(Duration);
  Times own_times() const { return own_times_; }
  /// Chooses by the sums of all ranks' own_times().
  void decide(std::uint64_t single_copy_ns, std::uint64_t staged_ns);
  /// Protocol of the current call, for which begin_call() returned true.
  bool uses_single_copy() const { return call_ <= samples || prefers_single_copy_; }

  static constexpr unsigned samples = 4, min_hold = 128, max_hold = 1024;  // calls

 private:
  bool enabled_ = false, prefers_single_copy_ = false;
  unsigned call_ = 0, hold_ = 0;  // calls of this round so far; calls that the choice is held for
  Times own_times_;
};

inline void SingleCopyTuner::record(Duration d) {
  const auto ns = static_cast<std::uint32_t>(std::clamp<std::int64_t>(d.count(), 1, 0xffffffff));
  std::uint32_t& minimum = call_ <= samples ? own_times_.single_copy_ns : own_times_.staged_ns;
  if (minimum == 0 || ns < minimum) minimum = ns;
}

/// Requires a 10% gain: staging completes earlier on the sender and needs no ptrace permission.
inline void SingleCopyTuner::decide(std::uint64_t single_copy_ns, std::uint64_t staged_ns) {
  const bool better = 10 * single_copy_ns < 9 * staged_ns;
  hold_ = hold_ && better == prefers_single_copy_ ? std::min(2 * hold_, max_hold) : min_hold;
  prefers_single_copy_ = better;
}

}  // namespace rz::intranode
