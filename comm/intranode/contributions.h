#pragma once
/// Contributions of staged calls: this rank's own, written into its slots or staging ring, and those of its
/// peers, read there. Not thread safe.

#include <memory>
#include <span>
#include <vector>

#include "comm/intranode/mailbox/mailbox_channel.h"
#include "comm/intranode/plan/planned_call.h"

namespace rz::intranode {

class Contributions {
 public:
  Contributions(MailboxChannel& channel, int size)
      : channel_(channel),
        operands_(index(size)),
        collected_slots_(std::make_unique<std::byte[]>(index(size) * max_inline_slots * inline_bytes)) {}

  /// MailboxChannel::try_reserve() for the next contribution.
  bool try_reserve(const PlannedCall& c) {
    const Reservation own = c.plan.contribution_reservation(c.ranks().size, c.ranks().is_sender);
    return channel_.try_reserve(own.ring_bytes, own.writes_ring, own.slots);
  }
  /// Publishes this rank's contribution of one round, which is reserved.
  void send(const PlannedCall&, std::size_t round);
  /// True once all ranks that this one reads from have published that step. `next` is the rank to resume
  /// with.
  bool all_arrived(const PlannedCall&, int& next, StepNumber);
  /// Where rank r's contribution of that step lies. Of several slots, only those that this rank needs.
  std::byte* of(const PlannedCall& c, int r, StepNumber step) const {
    if (c.plan.inline_slots > 1) return collected_slots_.get() + index(r) * max_inline_slots * inline_bytes;
    return c.inlined() ? channel_.payload(r, step) : channel_.bytes(r, step);
  }
  /// What a peer's contribution has for this rank.
  const std::byte* for_this_rank(const PlannedCall& c, int peer, StepNumber step) const {
    return of(c, peer, step) + c.layout.contribution_offset(c.plan, peer, c.ranks().rank);
  }
  /// The operands of a reduction, by rank: all contributions of that step, and this rank's input at an
  /// offset.
  std::span<const void*> operands(const PlannedCall& c, std::size_t input, StepNumber step) {
    for (int r = 0; r < c.ranks().size; ++r)
      operands_[index(r)] = r == c.ranks().rank ? c.in() + input : for_this_rank(c, r, step);
    return operands_;
  }
  /// Acknowledges a whole call, whose steps end before this one.
  void ack_all(const PlannedCall& c, StepNumber end) {
    c.defers_ack ? channel_.ack_lazily(end) : channel_.ack(end);
  }

 private:
  static std::size_t index(int rank) { return static_cast<std::size_t>(rank); }
  bool arrived(const PlannedCall& c, int peer, StepNumber step) {
    return c.plan.inline_slots > 1 ? collect_slots(c, peer, step) : channel_.poll(peer, step);
  }
  bool collect_slots(const PlannedCall&, int peer, StepNumber);
  void send_slots(const PlannedCall&);
  void write(const PlannedCall&, std::size_t round);

  MailboxChannel& channel_;
  std::vector<const void*> operands_;
  std::unique_ptr<std::byte[]> collected_slots_;  // payloads of several slots, contiguous, by rank
  std::uint32_t next_slot_ = 0;                   // the next of a peer's slots to collect
};

inline bool Contributions::all_arrived(const PlannedCall& c, int& next, StepNumber step) {
  const CallRanks& ranks = c.ranks();
  for (next = std::max(next, ranks.first_source); next < ranks.last_source; ++next)
    if (next != ranks.rank && !arrived(c, next, step)) return false;
  next = 0;
  return true;
}

}  // namespace rz::intranode
