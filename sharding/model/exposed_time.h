#pragma once
/// Exposed communication: the time in which the thread of a rank waits for communication.

#include <chrono>

#include "comm/work.h"

namespace rz {

/// Counts the waits of one step after the other.
class ExposedTime {
 public:
  /// Waits for `work` in the order of the stream.
  void wait(const Work& work, const Stream& stream) {
    measure([&] { work.wait_on(stream); });
  }
  /// Runs f, which waits.
  template <class F>
  void measure(const F& f) {
    const auto start = std::chrono::steady_clock::now();
    f();
    add(std::chrono::steady_clock::now() - start);
  }
  /// Counts a wait that was measured elsewhere.
  void add(std::chrono::nanoseconds wait) { now_ += wait, total_ += wait; }
  /// The next wait belongs to the next step.
  void end_step() {
    last_ = now_;
    now_ = {};
  }
  /// Of all steps.
  std::chrono::nanoseconds total() const { return total_; }
  /// Seconds in the last step that has ended.
  double last_step() const { return std::chrono::duration<double>(last_).count(); }

 private:
  std::chrono::nanoseconds now_{}, last_{}, total_{};
};

}  // namespace rz
