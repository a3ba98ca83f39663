#pragma once
/// The wait of a destructor for work that should end, but may hang.

#include <chrono>
#include <thread>

#include "comm/core/deadline.h"

namespace rz {

/// How long a destructor waits at most. Work in flight on a healthy group takes milliseconds.
inline constexpr std::chrono::seconds drain_timeout{5};

/// Polls `done()` every 100 us until it is true or the deadline has expired. Returns whether it is true.
template <class Done>
bool drain(const Done& done, const Deadline& deadline) {
  while (!done()) {
    if (deadline.expired()) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  return true;
}

}  // namespace rz
