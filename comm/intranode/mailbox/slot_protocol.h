#pragma once
/// The parts of the slot protocol (mailbox_channel.h) that are values: numbers of steps, what a mailbox
/// shows, the history of calls, deferred acknowledgements, and places in the staging ring. The verifier
/// (tests/proof/rank_plans.h) runs the last two as well.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "comm/transport/call_signature.h"
#include "comm/transport/mailbox.h"

namespace rz::intranode {

// ---- steps

/// Steps number the slots of all mailboxes of a node: 32-bit numbers that wrap around. Steps that are
/// compared are less than 2^31 apart.
using StepNumber = std::uint32_t;

inline bool is_after(StepNumber a, StepNumber b) { return static_cast<std::int32_t>(a - b) > 0; }

/// One more than the last step that the rank has published.
inline StepNumber produced_before(const Mailbox& m) { return m.produced.load(std::memory_order_acquire); }
/// The rank has acknowledged the steps before this one.
inline StepNumber acked_before(const Mailbox& m) { return m.acked.load(std::memory_order_acquire); }
/// The tag in that step's slot, perhaps of another step (CallHistory::tag_of()).
inline std::uint64_t slot_tag(const Mailbox& m, StepNumber step) {
  return m.slots[step % mailbox_depth].tag.load(std::memory_order_acquire);
}

// ---- calls

/// The current call of a channel, and a hash of all calls up to it, which slot tags carry. Histories that
/// differed once differ from then on, so that a rank detects a mismatch even if it polls the peer's slots
/// much later.
class CallHistory {
 public:
  static constexpr int hash_shift = 32;  ///< of a tag: step + 1 below, the upper half of the hash above

  void begin(const CallSignature& call) {
    call_ = call;
    call_hash_ = hash_of(call);
    repeat(call.sequence);
  }
  /// begin() of a call that differs from the last one in its sequence number only.
  void repeat(std::uint32_t sequence) {
    sequence_ = sequence;
    hash_ = (hash_ ^ call_hash_) * 0x9e3779b97f4a7c15u;
    hash_ ^= hash_ >> 29;
  }
  CallSignature call() const {
    CallSignature call = call_;
    call.sequence = sequence_;
    return call;
  }
  void write_to(CallSignature& entry) const { entry = call_, entry.sequence = sequence_; }
  std::uint64_t tag_of(StepNumber step) const { return (hash_ >> hash_shift << hash_shift) | (step + 1); }

 private:
  static std::uint64_t hash_of(const CallSignature&);

  // The sequence number is apart: a store of one field followed by a load of the whole signature is slow.
  CallSignature call_;
  std::uint32_t sequence_ = 0;
  std::uint64_t call_hash_ = 0;  // of call_, without the sequence number
  std::uint64_t hash_ = 0;       // of all calls
};

/// Throws Errc::mismatch on rank `own`, which found another history in the slot of that step of rank `peer`.
/// Names the first call that differed, if it is among the 256 steps before `next`; otherwise `current`. The
/// culprit is the first rank whose call differs from that of more than half of the ranks, for which it waits
/// a second at most; -1 if there is no such call.
[[noreturn]] void fail_mismatch(std::span<const MailboxView> mailboxes, int own, int peer, StepNumber step,
                                StepNumber next, const CallSignature& current);

// ---- acknowledgements

/// An acknowledgement that is written later: in the next period of 16 steps, or before its rank blocks.
struct DeferredAck {
  static constexpr StepNumber period = 16;  ///< steps; less than this many stay unacknowledged

  /// Replaces the step; true if it is time to write it.
  bool defer(StepNumber s) {
    const bool is_time = (step ^ s) >= period;
    pending = true, step = s;
    return is_time;
  }
  bool pending = false;
  StepNumber step = 0;
};

// ---- staging ring

/// What a move reserves before it publishes.
struct Reservation {
  std::size_t ring_bytes = 0;  ///< 0: the payload is in the slots
  bool writes_ring = false;    ///< this rank writes these bytes
  std::uint32_t slots = 1;
};

/// Where the bytes of each step lie in the staging rings, and which steps' bytes a new reservation
/// overwrites. All ranks reserve the same bytes at the same steps, so that each computes all offsets locally
/// and none is transferred.
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
