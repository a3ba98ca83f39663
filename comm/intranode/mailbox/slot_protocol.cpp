#include "comm/intranode/mailbox/slot_protocol.h"

#include <sched.h>

#include <chrono>
#include <optional>
#include <utility>

#include "comm/core/deadline.h"
#include "comm/core/error.h"
#include "comm/core/integer_math.h"
#include "comm/transport/call_signature.h"

namespace rz::intranode {

// ---- calls

std::uint64_t CallHistory::hash_of(const CallSignature& s) {
  std::uint64_t h = 0;
  for (const std::uint64_t word :
       {s.count, static_cast<std::uint64_t>(static_cast<std::uint32_t>(s.root)),
        static_cast<std::uint64_t>(s.kind) | static_cast<std::uint64_t>(s.dtype) << 8 |
            static_cast<std::uint64_t>(s.op) << 16}) {
    h = (h ^ word) * 0x9e3779b97f4a7c15u;
    h ^= h >> 29;
  }
  return h;
}

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

CallsOfRanks calls_begun_at(std::span<const MailboxView> mailboxes, StepNumber step) {
  CallsOfRanks calls;
  for (const MailboxView& m : mailboxes) calls.push_back(call_begun_at(*m.mailbox, step));
  return calls;
}

bool has_call(const std::optional<CallSignature>& call) { return call.has_value(); }

}  // namespace

void fail_mismatch(std::span<const MailboxView> mailboxes, int own, int peer, StepNumber step,
                   StepNumber next, const CallSignature& current) {
  const Mailbox& other = *mailboxes[static_cast<std::size_t>(peer)].mailbox;
  const Deadline end = Deadline::after(std::chrono::seconds(1));
  // call_log is written just after the tag; a preempted rank may take longer.
  while (is_after(step + 1, produced_before(other)) && !end.expired()) sched_yield();
  for (StepNumber s = next - static_cast<StepNumber>(mailbox_depth); s != next; ++s) {
    CallsOfRanks calls = calls_begun_at(mailboxes, s);
    const auto mine = calls[static_cast<std::size_t>(own)];
    if (!mine || rank_that_differs(calls, *mine) < 0) continue;
    // The other ranks are about to make theirs, unless they wait for one of this rank.
    while (rank_of_majority(calls) < 0 && !std::ranges::all_of(calls, has_call) && !end.expired()) {
      sched_yield();
      calls = calls_begun_at(mailboxes, s);
    }
    fail_mismatched(calls, own);
  }
  fail(Errc::mismatch, "mismatched collectives: rank ", peer, " made other calls than rank ", own,
       " some time before ", describe(current), "; every rank must make the same calls in the same order");
}

// ---- staging ring

/// Places the bytes behind the last reservation, or at the ring's beginning if they do not fit into the
/// window. Reservations of the current lap do not overlap. Those of the previous lap overlap if they begin
/// before the end of this one. All older ones are treated as overlapping.
void StagingCursor::reserve(StepNumber step, std::size_t bytes) {
  if (next_ + bytes > window_) next_ = 0, overwritten_before_ = std::exchange(lap_begin_, step);
  offsets_[step % mailbox_depth] = static_cast<std::uint32_t>(next_);
  next_ = round_up(next_ + bytes, cache_line_bytes);
  const StepNumber kept = step + 1 - static_cast<StepNumber>(mailbox_depth);
  if (is_after(kept, overwritten_before_)) overwritten_before_ = kept;
  if (is_after(kept, lap_begin_)) lap_begin_ = kept;
  while (is_after(lap_begin_, overwritten_before_) && offset(overwritten_before_) < next_)
    ++overwritten_before_;
}

}  // namespace rz::intranode
