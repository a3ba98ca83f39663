#pragma once
/// Decides which calls of one kind and size exchange buffer handles, which costs one slot round trip. All
/// ranks count the same calls and see the same handles, so all decide alike without communication.

#include <algorithm>

#include "comm/intranode/single_copy_tuner.h"

namespace rz::intranode {

/// Exponential backoff: after n consecutive probes of a shape without usable buffers, the next 2^n - 1 calls
/// (at most 63) exchange no handles. If all ranks can read each other's private buffers and the policy is
/// adaptive, the sixth such probe enables the SingleCopyTuner, which decides from then on.
class ZeroCopyBackoff {
 public:
  static constexpr unsigned max_skipped = 63;  ///< consecutive calls

  /// Counts the next call; true if it exchanges handles.
  bool should_probe() {
    if (tuner_.enabled()) return tuner_.begin_call();
    if (remaining_ == 0) return true;
    --remaining_;
    return false;
  }
  /// Result of a probe. `usable`: all buffers are accessible, and zero-copy or single-copy is used.
  /// `adaptive`: all buffers are readable by CMA, and the SingleCopyTuner decides.
  void record(bool usable, bool adaptive) {
    if (adaptive && tuner_.enabled()) return;
    tuner_.disable();
    if (adaptive && interval_ == max_skipped / 2) tuner_.enable();  // the staging rings are warm by now
    interval_ = usable ? 0 : std::min(2 * interval_ + 1, max_skipped);
    remaining_ = interval_;
  }

  /// While enabled, the tuner decides instead of the backoff.
  SingleCopyTuner& tuner() { return tuner_; }
  const SingleCopyTuner& tuner() const { return tuner_; }

 private:
  unsigned remaining_ = 0, interval_ = 0;
  SingleCopyTuner tuner_;
};

}  // namespace rz::intranode
