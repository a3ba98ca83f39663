#pragma once
/// Errors of ranks that made different calls.

#include "comm/intranode/mailbox/step_number.h"
#include "comm/transport/call_signature.h"
#include "comm/transport/mailbox.h"

namespace rz::intranode {

struct RankMailbox {
  const Mailbox& mailbox;
  int rank;
};

/// Throws Errc::mismatch on rank `own`, which found another history in the peer's slot of that step. Names
/// the first call that differed, if it is among the 256 steps before `next`; otherwise `current`.
[[noreturn]] void fail_mismatch(RankMailbox own, RankMailbox peer, StepNumber step, StepNumber next,
                                const CallSignature& current);

}  // namespace rz::intranode
