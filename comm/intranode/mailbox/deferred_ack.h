#pragma once
/// An acknowledgement that is written later: in the next period of 16 steps, or before its rank blocks. A
/// plain value.

#include "comm/intranode/mailbox/step_number.h"

namespace rz::intranode {

struct DeferredAck {
  static constexpr StepNumber period = 16;  ///< steps; less than this many stay unacknowledged

  /// Replaces the step; true if it is time to write it.
  bool defer(StepNumber s) {
    const bool is_time = (step ^ s) >= period;
    pending = true, step = s;
    return is_time;
  }
  bool pending = false;
  StepNumber step = 0;
};

}  // namespace rz::intranode
