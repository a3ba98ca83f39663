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

class WayByTime {
 public:
  using Duration = std::chrono::nanoseconds;
  /// The shortest of one rank's trials.
  struct Times {
    std::uint32_t once_ns = 0, staged_ns = 0;
    bool operator==(const Times&) const = default;
  };

  bool on() const { return on_; }
  void start() { *this = {}, on_ = true; }
  void stop() { *this = {}; }

  /// The next call, while on(). Whether ranks have to tell each other where its memory lies.
  bool begin() {
    if (at_ > 2 * trials + rest_) at_ = 0, mine_ = {};
    const unsigned now = at_++;
    return now < trials || now == 2 * trials || (now > 2 * trials && once_);
  }
  /// Of that call: it is a trial, and has to be ended with took().
  bool is_trial() const { return at_ <= 2 * trials; }
  /// It is the one at which ranks choose.
  bool chooses() const { return at_ == 2 * trials + 1; }
  void took(Duration);
  Times mine() const { return mine_; }
  /// By the sums of all ranks' times.
  void choose(std::uint64_t once_ns, std::uint64_t staged_ns);
  /// Whether the call under way copies once; it has asked.
  bool once() const { return at_ <= trials || once_; }

  static constexpr unsigned trials = 4, least_rest = 128, most_rest = 1024;  // calls

 private:
  bool on_ = false, once_ = false;
  unsigned at_ = 0, rest_ = 0;  // calls since the round began; after the choice
  Times mine_;
};

inline void WayByTime::took(Duration d) {
  const auto ns = static_cast<std::uint32_t>(std::clamp<std::int64_t>(d.count(), 1, 0xffffffff));
  std::uint32_t& least = at_ <= trials ? mine_.once_ns : mine_.staged_ns;
  if (least == 0 || ns < least) least = ns;
}

/// Not for a little: staged calls end sooner for who only sends, and need nobody's leave.
inline void WayByTime::choose(std::uint64_t once_ns, std::uint64_t staged_ns) {
  const bool better = 10 * once_ns < 9 * staged_ns;
  rest_ = rest_ && better == once_ ? std::min(2 * rest_, most_rest) : least_rest;
  once_ = better;
}

}  // namespace rz
