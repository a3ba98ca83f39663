#pragma once
/// Errors of ranks that made different calls.

#include <span>

#include "comm/intranode/mailbox/step_number.h"
#include "comm/transport/call_signature.h"
#include "comm/transport/mailbox.h"

namespace rz::intranode {

/// Throws Errc::mismatch on rank `own`, which found another history in the slot of that step of rank `peer`.
/// Names the first call that differed, if it is among the 256 steps before `next`; otherwise `current`. The
/// culprit is the first rank whose call differs from that of more than half of the ranks, for which it waits
/// a second at most; -1 if there is no such call.
[[noreturn]] void fail_mismatch(std::span<const MailboxView> mailboxes, int own, int peer, StepNumber step,
                                StepNumber next, const CallSignature& current);

}  // namespace rz::intranode
