#pragma once
/// What a rank has published in its mailbox, as every rank of the node reads it.

#include "comm/intranode/mailbox/step_number.h"
#include "comm/transport/mailbox.h"

namespace rz::intranode {

/// One more than the last step that the rank has published.
inline StepNumber produced_before(const Mailbox& m) { return m.produced.load(std::memory_order_acquire); }
/// The rank has acknowledged the steps before this one.
inline StepNumber acked_before(const Mailbox& m) { return m.acked.load(std::memory_order_acquire); }
/// The tag in that step's slot, perhaps of another step (CallHistory::tag_of()).
inline std::uint64_t slot_tag(const Mailbox& m, StepNumber step) {
  return m.slots[step % mailbox_depth].tag.load(std::memory_order_acquire);
}

}  // namespace rz::intranode
