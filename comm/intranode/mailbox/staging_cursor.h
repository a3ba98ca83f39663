#pragma once
/// Where the bytes of each step lie in the staging rings, and which steps' bytes a new reservation
/// overwrites. All ranks reserve the same bytes at the same steps, so that each computes all offsets locally
/// and none is transferred. A plain value, which the verifier (comm/proof/rank_plans.h) runs, too.

#include <algorithm>
#include <array>
#include <cstddef>

#include "comm/intranode/mailbox/step_number.h"
#include "comm/transport/mailbox.h"

namespace rz::intranode {

class StagingCursor {
 public:
  StagingCursor(std::size_t ring_bytes, StepNumber first)
      : ring_bytes_(ring_bytes), window_(ring_bytes), lap_begin_(first), overwritten_before_(first) {}

  std::size_t ring_bytes() const { return ring_bytes_; }
  /// Restricts the following reservations to the first `bytes` of the ring.
  void set_window(std::size_t bytes) { window_ = std::min(bytes, ring_bytes_); }

  /// Reserves `bytes` for that step; steps follow each other.
  void reserve(StepNumber, std::size_t bytes);
  /// Reserves nothing for that step and those after it, `slots` in all.
  void reserve_slots(StepNumber step, std::uint32_t slots) {
    // Every 32 steps, so that lap_begin_ and overwritten_before_ stay within the last 256 steps.
    if (((step - 1) ^ (step + slots - 1)) >= 32) reserve(step, 0);
    const StepNumber end = step + slots;
    do offsets_[step % mailbox_depth] = static_cast<std::uint32_t>(next_);
    while (++step != end);
  }

  /// Bytes from the ring's beginning; of the last 256 reserved steps.
  std::size_t offset(StepNumber step) const { return offsets_[step % mailbox_depth]; }
  /// All peers must have acknowledged the steps before this one, before a rank writes the slots of the last
  /// reservation, from `step` on; if it `writes` its ring bytes, those whose bytes they overwrite, too.
  StepNumber needed_ack(StepNumber step, bool writes, std::uint32_t slots) const {
    const StepNumber reused = step + slots - static_cast<StepNumber>(mailbox_depth);
    return writes && is_after(overwritten_before_, reused) ? overwritten_before_ : reused;
  }

 private:
  std::array<std::uint32_t, mailbox_depth> offsets_{};  // of the last 256 steps
  std::size_t ring_bytes_, window_;
  std::size_t next_ = 0;  // end of the last reservation
  StepNumber lap_begin_;  // first step of the current lap of the ring
  // Bytes of steps before this one overlap those of the last reservation, or are treated so.
  StepNumber overwritten_before_;
};

}  // namespace rz::intranode
