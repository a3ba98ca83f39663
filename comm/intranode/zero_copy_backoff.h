#pragma once
/// Whether calls of one kind and size ask where their memory lies, which costs a letter. Pure: every rank
/// counts the same calls and hears the same answers, so all ask alike.

#include <algorithm>

#include "comm/intranode/single_copy_tuner.h"

namespace rz {

/// Calls that asked in vain do so the less often, the more of them there were. Where all may read each
/// other's memory, but nobody shares it, time tells what that is worth, once the first such calls are over.
class ZeroCopyBackoff {
 public:
  static constexpr unsigned max_skipped = 63;  ///< calls in a row

  /// Whether the next call asks.
  bool should_probe() {
    if (tuner_.enabled()) return tuner_.begin_call();
    if (remaining_ == 0) return true;
    --remaining_;
    return false;
  }
  /// What a call that asked was told: that all of its memory can be used where it lies, or else that it can
  /// be read, which is worth it only if it is faster.
  void record(bool usable, bool readable_by_time) {
    if (readable_by_time && tuner_.enabled()) return;
    tuner_.disable();
    if (readable_by_time && interval_ == max_skipped / 2) tuner_.enable();  // rings are warm by now
    interval_ = usable ? 0 : std::min(2 * interval_ + 1, max_skipped);
    remaining_ = interval_;
  }

  /// On: the calls are tried, or chosen, by time.
  SingleCopyTuner& tuner() { return tuner_; }
  const SingleCopyTuner& tuner() const { return tuner_; }

 private:
  unsigned remaining_ = 0, interval_ = 0;
  SingleCopyTuner tuner_;
};

}  // namespace rz
