#include "tests/support/sim_clock.h"

#include <algorithm>
#include <utility>

namespace rz::test {

void SimClock::schedule(SimTime delay, int rank, std::function<void()> action) {
  events_.push_back({now_ + delay, created_++, rank, std::move(action)});
  std::push_heap(events_.begin(), events_.end());
}

std::optional<SimTime> SimClock::next() const {
  return events_.empty() ? std::nullopt : std::optional(events_.front().time);
}

int SimClock::run_next() {
  std::pop_heap(events_.begin(), events_.end());
  const Event event = std::move(events_.back());
  events_.pop_back();
  now_ = event.time;
  event.action();
  return event.rank;
}

}  // namespace rz::test
