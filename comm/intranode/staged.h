#pragma once
/// The staged protocols: senders copy contributions into slots or their staging ring, and receivers read them
/// there. Not thread safe.

#include <algorithm>
#include <memory>
#include <span>
#include <vector>

#include "comm/intranode/mailbox/mailbox_channel.h"
#include "comm/intranode/plan/planned_call.h"
#include "comm/intranode/plan/rounds.h"

namespace rz::intranode {

/// Contributions of a call: this rank's own, written into its slots or staging ring, and those of its peers,
/// read there.
class Contributions {
 public:
  Contributions(MailboxChannel& channel, int size)
      : channel_(channel),
        operands_(index(size)),
        collected_slots_(std::make_unique<std::byte[]>(index(size) * max_inline_slots * inline_bytes)) {}

  /// Publishes this rank's contribution of one round, which is reserved.
  void send(const PlannedCall&, std::size_t round);
  /// True once all ranks that this one reads from have published that step. `next` is the rank to resume
  /// with.
  bool all_arrived(const PlannedCall& c, int& next, StepNumber step) {
    const CallRanks& ranks = c.ranks();
    for (next = std::max(next, ranks.first_source); next < ranks.last_source; ++next)
      if (next != ranks.rank && !arrived(c, next, step)) return false;
    next = 0;
    return true;
  }
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

/// Every rank reads the contributions that it needs.
class OneShotCall {
 public:
  OneShotCall(MailboxChannel& channel, Contributions& contributions)
      : channel_(channel), contributions_(contributions) {}

  /// Begins a call whose first contribution has that step.
  void start(const PlannedCall&, StepNumber first);
  /// Begins a call whose contribution was sent; `peer` is the one to poll next.
  void resume(const PlannedCall& c, StepNumber first, int peer) {
    start(c, first);
    rounds_.done.contributed = 1;
    next_ = peer;
  }
  /// Moves data without blocking; true on any progress.
  bool advance(const PlannedCall&);
  bool complete() const { return rounds_.complete(); }
  /// Reduces or copies the contributions of one round, at that step, into the output.
  void read(const PlannedCall&, std::size_t round, StepNumber);

 private:
  MailboxChannel& channel_;
  Contributions& contributions_;
  OneShotRounds rounds_;
  int next_ = 0;  // the peer that polling resumes with
};

/// An all_reduce: rank r reduces shard r, then all ranks gather the shards.
class TwoShotCall {
 public:
  TwoShotCall(MailboxChannel& channel, Contributions& contributions)
      : channel_(channel), contributions_(contributions) {}

  void start(const PlannedCall&, StepNumber first);
  /// Moves data without blocking; true on any progress.
  bool advance(const PlannedCall&);
  bool complete() const { return rounds_.complete(); }

 private:
  bool try_contribute(const PlannedCall&);
  bool try_reduce(const PlannedCall&);
  bool try_gather(const PlannedCall&);
  void reduce(const PlannedCall&, std::size_t round);
  void gather(const PlannedCall&, std::size_t round);

  MailboxChannel& channel_;
  Contributions& contributions_;
  TwoShotRounds rounds_;
  int next_contribution_ = 0, next_result_ = 0;  // the peers that polling resumes with
};

}  // namespace rz::intranode
