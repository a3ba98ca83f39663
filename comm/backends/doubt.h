#pragma once
/// Whether calls of one kind and size ask where their memory lies, which costs a letter. Pure: every rank
/// counts the same calls and hears the same answers, so all ask alike.

#include <algorithm>

#include "comm/backends/way_by_time.h"

namespace rz {

/// Calls that asked in vain do so the less often, the more of them there were. Where all may read each
/// other's memory, but nobody shares it, time tells what that is worth, once the first such calls are over.
class Doubt {
 public:
  static constexpr unsigned most_unasked = 63;  ///< calls in a row

  /// Whether the next call asks.
  bool asks() {
    if (by_time_.on()) return by_time_.begin();
    if (left_ == 0) return true;
    --left_;
    return false;
  }
  /// What a call that asked was told: that all of its memory can be used where it lies, or else that it can
  /// be read, which is worth it only if it is faster.
  void told(bool usable, bool readable_by_time) {
    if (readable_by_time && by_time_.on()) return;
    by_time_.stop();
    if (readable_by_time && last_ == most_unasked / 2) by_time_.start();  // rings are warm by now
    last_ = usable ? 0 : std::min(2 * last_ + 1, most_unasked);
    left_ = last_;
  }

  /// On: the calls are tried, or chosen, by time.
  WayByTime& by_time() { return by_time_; }
  const WayByTime& by_time() const { return by_time_; }

 private:
  unsigned left_ = 0, last_ = 0;
  WayByTime by_time_;
};

}  // namespace rz
