#pragma once
/// How far each step of a call is.

#include <cstddef>
#include <cstdint>
#include <vector>

namespace rz::schedule {

struct StepProgress {
  std::size_t size = 0, done = 0;  ///< bytes; a send: bytes that the transport has accepted
  std::uint64_t stream_begin = 0;  ///< a send: its first byte in all bytes posted to the peer
  bool finished = false;
};

class StepProgressList {
 public:
  /// For a new call, whose steps have no size yet.
  void start(std::size_t steps) {
    steps_.assign(steps, {});
    first_unfinished_ = 0;
    unfinished_ = steps;
  }
  StepProgress& operator[](int step) { return steps_[static_cast<std::size_t>(step)]; }
  const StepProgress& operator[](int step) const { return steps_[static_cast<std::size_t>(step)]; }
  void finish(int step) {
    (*this)[step].finished = true;
    --unfinished_;
    while (first_unfinished_ < steps_.size() && steps_[first_unfinished_].finished) ++first_unfinished_;
  }
  bool all_finished() const { return unfinished_ == 0; }
  int first_unfinished() const { return static_cast<int>(first_unfinished_); }
  int size() const { return static_cast<int>(steps_.size()); }

 private:
  std::vector<StepProgress> steps_;
  std::size_t first_unfinished_ = 0, unfinished_ = 0;
};

}  // namespace rz::schedule
