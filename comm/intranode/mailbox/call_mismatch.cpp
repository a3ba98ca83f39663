#include "comm/intranode/mailbox/call_mismatch.h"

#include <sched.h>

#include <chrono>
#include <optional>

#include "comm/core/deadline.h"
#include "comm/core/error.h"
#include "comm/intranode/mailbox/call_history.h"
#include "comm/intranode/mailbox/published.h"

namespace rz::intranode {

namespace {

/// True if `step` is the first of a call: slots of one call share one history hash. False, too, if the slot
/// of the step before was overwritten.
bool begins_call(const Mailbox& m, StepNumber step) {
  const std::uint64_t before = slot_tag(m, step - 1), there = slot_tag(m, step);
  return static_cast<StepNumber>(before) == step &&
         before >> CallHistory::hash_shift != there >> CallHistory::hash_shift;
}

/// The call that began at that step; empty if none did, or if the entry was overwritten.
std::optional<CallSignature> call_begun_at(const Mailbox& m, StepNumber step) {
  const auto is_there = [&] { return static_cast<StepNumber>(slot_tag(m, step)) == step + 1; };
  if (!is_there() || !is_after(produced_before(m), step) || !begins_call(m, step)) return std::nullopt;
  const CallSignature call = m.call_log[step % mailbox_depth];
  std::atomic_thread_fence(std::memory_order_acquire);
  return is_there() ? std::optional(call) : std::nullopt;
}

}  // namespace

void fail_mismatch(RankMailbox own, RankMailbox peer, StepNumber step, StepNumber next,
                   const CallSignature& current) {
  // call_log is written just after the tag; a preempted rank may take longer.
  for (const Deadline end = Deadline::after(std::chrono::seconds(1));
       is_after(step + 1, produced_before(peer.mailbox)) && !end.expired();)
    sched_yield();
  constexpr const char* remedy = "; every rank must make the same calls in the same order";
  for (StepNumber s = next - static_cast<StepNumber>(mailbox_depth); s != next; ++s) {
    const auto theirs = call_begun_at(peer.mailbox, s), mine = call_begun_at(own.mailbox, s);
    if (!theirs || !mine || *theirs == *mine) continue;
    fail(Errc::mismatch, "mismatched collectives: rank ", peer.rank, " called ", describe(*theirs),
         " while rank ", own.rank, " called ", describe(*mine), remedy);
  }
  fail(Errc::mismatch, "mismatched collectives: rank ", peer.rank, " made other calls than rank ", own.rank,
       " some time before ", describe(current), remedy);
}

}  // namespace rz::intranode
