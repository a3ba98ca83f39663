#include "comm/intranode/mailbox/mailbox_channel.h"

#include "comm/core/error.h"
#include "comm/os/wait_policy.h"

namespace rz::intranode {

MailboxChannel::MailboxChannel(SharedMemoryGroup& memory, int rank, int size, StepNumber first_step)
    : shared_memory_(memory),
      views_(memory.mailboxes().begin(), memory.mailboxes().end()),
      rank_(rank),
      size_(size),
      own_(*views_[index(rank)].mailbox),
      next_step_(first_step),
      first_step_(first_step),
      acked_(index(size), first_step),
      staging_(views_[0].staging_bytes, first_step) {
  if (first_step == 0) return;  // the state of zeroed memory
  for (MailboxSlot& l : own_.slots) l.tag.store(first_step);
  own_.acked.store(first_step);
  own_.produced.store(first_step);
}

void MailboxChannel::spin_once() {
  flush_acks();
  for (int i = 0; i < intranode_wait_policy.spins_per_poll; ++i) {
    if (awaited_.condition == Awaited::slot &&
        !is_after(awaited_.before,
                  static_cast<StepNumber>(slot_tag(mailbox(awaited_.peer), awaited_.before - 1))))
      return;
    if (awaited_.condition == Awaited::space && spin_for_space()) return;
    if (i >= intranode_wait_policy.unpaused_spins) cpu_pause();
  }
}

/// Waits for a share of the steps in flight, and polls seldom if they are many: a writer that polled for the
/// next free slot would cost the reader a cache miss at every acknowledgement.
bool MailboxChannel::spin_for_space() const {
  const StepNumber batch = (next_step_ - awaited_.before) / intranode_wait_policy.space_share;
  if (!is_after(awaited_.before + batch, acked_before(mailbox(awaited_.peer)))) return true;
  for (StepNumber i = 0; i < batch; i += 4) cpu_pause();
  return false;
}

void MailboxChannel::check_peer_alive() {
  flush_acks();
  if (awaited_.condition != Awaited::nothing) shared_memory_.require_alive(awaited_.peer);
}

WaitState MailboxChannel::waiting_on(const PeerFilter& reads_from) const {
  const auto is_behind = [&](int a, int b) {
    const StepNumber x = produced_before(mailbox(a)), y = produced_before(mailbox(b));
    return x != y ? is_after(y, x) : is_after(acked_before(mailbox(b)), acked_before(mailbox(a)));
  };
  WaitState state;
  const bool for_space = awaited_.condition == Awaited::space;
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    const bool missing = for_space ? is_after(awaited_.before, acked_before(mailbox(r)))
                                   : awaited_.condition == Awaited::slot && reads_from(r) &&
                                         is_after(awaited_.before, produced_before(mailbox(r)));
    if (!missing) continue;
    if (index(r) < state.waiting_on.size()) state.waiting_on.set(index(r));
    if (state.suspect < 0 || is_behind(r, state.suspect)) state.suspect = r;
    state.text += concat(state.text.empty() ? "" : ", ", "rank ", r, for_space ? " to receive" : " to send");
  }
  if (state.suspect < 0) state.suspect = awaited_.peer, state.text = "no rank";
  return state;
}

}  // namespace rz::intranode
