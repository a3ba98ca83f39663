#include "comm/intranode/mailbox_channel.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include "comm/core/deadline.h"
#include "comm/core/error.h"
#include "comm/core/integer_math.h"

namespace rz {

namespace {

constexpr int spins_per_poll = 40;  // of spin_once(), on one condition
// The first spins have no pause instruction, which takes longer than a slot takes between near cores.
constexpr int unpaused_spins = 32;

std::uint64_t hash_signature(const CallSignature& s) {
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

}  // namespace

MailboxChannel::MailboxChannel(SharedMemoryGroup& memory, int rank, int size, std::uint32_t first_step)
    : shared_memory_(memory),
      views_(memory.mailboxes().begin(), memory.mailboxes().end()),
      rank_(rank),
      size_(size),
      own_(*views_[index(rank)].mailbox),
      next_step_(first_step),
      first_step_(first_step),
      acked_(index(size), first_step),
      staging_window_(views_[0].staging_bytes),
      lap_begin_(first_step),
      overwritten_before_(first_step) {
  if (first_step == 0) return;  // the state of zeroed memory
  for (MailboxSlot& l : own_.slots) l.tag.store(first_step);
  own_.acked.store(first_step);
  own_.produced.store(first_step);
}

void MailboxChannel::begin(const CallSignature& call) {
  call_ = call;
  call_hash_ = hash_signature(call);
  begin_repeat(call.sequence);
}

void MailboxChannel::set_staging_window(std::size_t bytes) {
  staging_window_ = std::min(bytes, staging_bytes());
}

/// Places the bytes behind the last reservation, or at the ring's beginning if they do not fit into the
/// window. Reservations of the current lap do not overlap. Those of the previous lap overlap if they begin
/// before the end of this one. All older ones are treated as overlapping.
void MailboxChannel::reserve_staging(std::size_t bytes) {
  is_reserved_ = true;
  if (staging_cursor_ + bytes > staging_window_)
    staging_cursor_ = 0, overwritten_before_ = std::exchange(lap_begin_, next_step_);
  staging_offset_[next_step_ % mailbox_depth] = static_cast<std::uint32_t>(staging_cursor_);
  staging_cursor_ = round_up(staging_cursor_ + bytes, cache_line_bytes);
  const std::uint32_t kept = next_step_ + 1 - static_cast<std::uint32_t>(mailbox_depth);
  if (is_after(kept, overwritten_before_)) overwritten_before_ = kept;
  if (is_after(kept, lap_begin_)) lap_begin_ = kept;
  while (is_after(lap_begin_, overwritten_before_) &&
         staging_offset_[overwritten_before_ % mailbox_depth] < staging_cursor_)
    ++overwritten_before_;
}

void MailboxChannel::spin_once() {
  flush_acks();
  for (int i = 0; i < spins_per_poll; ++i) {
    if (waiting_for_ == WaitingFor::slot &&
        !is_after(awaited_step_, static_cast<std::uint32_t>(slot_tag(awaited_peer_, awaited_step_ - 1))))
      return;
    if (waiting_for_ == WaitingFor::space && !is_after(awaited_step_, acked(awaited_peer_))) return;
    if (i >= unpaused_spins) cpu_pause();
  }
}

void MailboxChannel::check_peer_alive() {
  flush_acks();
  if (waiting_for_ != WaitingFor::nothing) shared_memory_.require_alive(awaited_peer_);
}

/// True if `step` is the first of a call: slots of one call share one history hash. False, too, if the slot
/// of the step before was overwritten.
bool MailboxChannel::begins_call(int rank, std::uint32_t step) const {
  const std::uint64_t before = slot_tag(rank, step - 1), there = slot_tag(rank, step);
  return static_cast<std::uint32_t>(before) == step && before >> history_shift != there >> history_shift;
}

void MailboxChannel::mismatch(int peer, std::uint32_t step) const {
  // call_log is written just after the tag; a preempted rank may take longer.
  for (const Deadline end = Deadline::after(std::chrono::seconds(1));
       is_after(step + 1, produced(peer)) && !end.expired();)
    sched_yield();
  const auto called = [&](int r, std::uint32_t s) -> std::optional<CallSignature> {
    const Mailbox& place = *views_[index(r)].mailbox;
    const auto tag = [&] {
      return static_cast<std::uint32_t>(place.slots[s % mailbox_depth].tag.load(std::memory_order_acquire));
    };
    if (tag() != s + 1 || !is_after(produced(r), s) || !begins_call(r, s)) return std::nullopt;
    const CallSignature call = place.call_log[s % mailbox_depth];
    std::atomic_thread_fence(std::memory_order_acquire);
    return tag() == s + 1 ? std::optional(call) : std::nullopt;  // the entry may have been overwritten
  };
  for (std::uint32_t s = next_step_ - static_cast<std::uint32_t>(mailbox_depth); s != next_step_; ++s) {
    const auto theirs = called(peer, s), mine = called(rank_, s);
    if (!theirs || !mine || *theirs == *mine) continue;
    fail(Errc::mismatch, "mismatched collectives: rank ", peer, " called ", describe(*theirs), " while rank ",
         rank_, " called ", describe(*mine), "; every rank must make the same calls in the same order");
  }
  fail(Errc::mismatch, "mismatched collectives: rank ", peer, " made other calls than rank ", rank_,
       " some time before ", describe(call()), "; every rank must make the same calls in the same order");
}

// ---- missing peers

WaitState MailboxChannel::waiting_on(const PeerFilter& reads_from) const {
  const auto is_behind = [&](int a, int b) {
    const std::uint32_t x = produced(a), y = produced(b);
    return x != y ? is_after(y, x) : is_after(acked(b), acked(a));
  };
  WaitState state;
  const bool for_space = waiting_for_ == WaitingFor::space;
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    const bool missing =
        for_space ? is_after(awaited_step_, acked(r))
                  : waiting_for_ == WaitingFor::slot && reads_from(r) && is_after(awaited_step_, produced(r));
    if (!missing) continue;
    if (index(r) < state.waiting_on.size()) state.waiting_on.set(index(r));
    if (state.suspect < 0 || is_behind(r, state.suspect)) state.suspect = r;
    state.text += concat(state.text.empty() ? "" : ", ", "rank ", r, for_space ? " to receive" : " to send");
  }
  if (state.suspect < 0) state.suspect = awaited_peer_, state.text = "nobody";
  return state;
}

}  // namespace rz
