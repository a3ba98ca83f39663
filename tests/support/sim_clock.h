#pragma once
/// Virtual time: a queue of events, in the order of their times.

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

namespace rz::test {

using SimTime = std::chrono::nanoseconds;

/// Time passes only from event to event. Events of equal times run in the order of their creation. Not
/// thread-safe.
class SimClock {
 public:
  SimTime now() const { return now_; }
  /// Adds an event at now() + delay (not negative): it runs `action` and then concerns `rank`.
  void schedule(SimTime delay, int rank, std::function<void()> action);
  /// The time of the next event, if there is one.
  std::optional<SimTime> next() const;
  /// Advances to the next event, removes it, runs its action and returns its rank. There must be one.
  int run_next();
  /// Advances to `time`. No event may be before it.
  void advance_to(SimTime time) { now_ = time; }

 private:
  struct Event {
    SimTime time;
    std::uint64_t order;
    int rank;
    std::function<void()> action;
    bool operator<(const Event& other) const {  // the heap has its largest element in front
      return time != other.time ? time > other.time : order > other.order;
    }
  };

  SimTime now_{};
  std::uint64_t created_ = 0;
  std::vector<Event> events_;  // a heap
};

}  // namespace rz::test
