#pragma once
/// Slot protocol of the intra-node engine (layout: comm/transport/mailbox.h). Each rank owns a mailbox of 256
/// cache-line slots, a tag and 56 bytes of payload each, which every rank of the node maps. A call consumes
/// the same step numbers on all ranks; step s uses slot s % 256. A rank may reuse a slot once all peers have
/// acknowledged its step. The tag carries a hash of the call history, so a mismatched collective, present or
/// past, is detected at the first slot that is polled.
///
/// Larger payloads go to the rank's staging ring, where StagingCursor places them.
///
/// Not thread safe: one thread at a time drives a channel. See README.md in this folder.

#include <algorithm>
#include <cstring>
#include <functional>
#include <vector>

#include "comm/intranode/mailbox/slot_protocol.h"
#include "comm/os/spin.h"
#include "comm/transport/mailbox.h"
#include "comm/transport/shared_memory_group.h"
#include "comm/transport/wait_for_graph.h"

namespace rz::intranode {

/// Copies a payload of a few dozen bytes inline, in less time than a call of memcpy().
inline void copy_small(std::byte* to, const std::byte* from, std::size_t bytes) {
  for (; bytes >= 8; bytes -= 8, to += 8, from += 8) std::memcpy(to, from, 8);
  if (bytes & 4) std::memcpy(to, from, 4), to += 4, from += 4;
  if (bytes & 2) std::memcpy(to, from, 2), to += 2, from += 2;
  if (bytes & 1) *to = *from;
}

/// The condition that try_reserve() or poll() last found unmet: for space, the peer must acknowledge all
/// steps before this one; for a slot, it must publish them.
struct Awaited {
  enum Condition { nothing, space, slot };
  Condition condition = nothing;
  StepNumber before = 0;
  int peer = -1;  ///< the first peer that had not
};

class MailboxChannel {
 public:
  /// Requires mailboxes(). Steps are counted from `first_step`, the same on every rank.
  /// Unless it is 0, all ranks must have constructed their channels before any of them begins a call.
  MailboxChannel(SharedMemoryGroup&, int rank, int size, StepNumber first_step);

  /// Begins a call at next_step(). This rank must have read everything that it needs of earlier calls.
  void begin(const CallSignature& call) { history_.begin(call), begin_steps(); }
  /// begin() of a call that differs from the last one in its sequence number only.
  void begin_repeat(std::uint32_t sequence) { history_.repeat(sequence), begin_steps(); }
  CallSignature call() const { return history_.call(); }
  /// Restricts the following reservations to the first `bytes` of the ring. The same on every rank.
  void set_staging_window(std::size_t bytes) { staging_.set_window(bytes); }
  std::size_t staging_bytes() const { return staging_.ring_bytes(); }
  /// The step of the next slot that this rank writes.
  StepNumber next_step() const { return next_step_; }

  /// Reserves the next slots and bytes of the staging ring; the same numbers on every rank. Returns false
  /// while a peer has not acknowledged a slot that this would overwrite, or, if this rank writes the bytes,
  /// ring data that they would overwrite; call it again then. Several slots reserve no ring bytes.
  bool try_reserve(const Reservation&);
  /// Publishes the slot of next_step(), whose payload and ring bytes are complete. try_reserve() may be
  /// omitted if it has neither and all peers have entered this call.
  void send();
  /// Publishes `slots` slots, one per step, with these bytes as payload. A receiver gets payload and tag in
  /// one cache miss, while ring bytes cost a second one.
  void send(std::uint32_t slots, const std::byte* from, std::size_t bytes);
  /// True once the peer has published that step; its payload and ring bytes can then be read. Throws
  /// Errc::mismatch, naming the first call that differed, if it is among the last 256 steps.
  bool poll(int peer, StepNumber step);
  /// poll() of all peers from `next` on, the rank to resume with; 0 again once all have published the step.
  bool poll_all(int& next, StepNumber step);
  /// Acknowledges all steps before this one: their writers may reuse slots and ring bytes.
  void ack(StepNumber step);
  /// Like ack(), but written later (DeferredAck). Only where no writer waits for it until 256 slots are full
  /// (may_defer_ack()), or where the next call's slot implies it.
  void ack_lazily(StepNumber step) {
    if (deferred_.defer(step)) flush_acks();
  }
  /// Writes a deferred ack.
  void flush_acks() {
    if (deferred_.pending) ack(deferred_.step);
  }

  std::byte* payload(int rank, StepNumber step) const {
    return views_[index(rank)].mailbox->slots[step % mailbox_depth].payload;
  }
  std::byte* bytes(int rank, StepNumber step) const {
    return views_[index(rank)].staging_ring + staging_.offset(step);
  }

  /// Spins up to 40 iterations on the condition that last failed: an ack in try_reserve(), a slot in poll().
  void spin_once();
  /// Flushes deferred acks. Throws if the peer that this rank waits for has left the group.
  void check_peer_alive();

  /// The peers that this rank waits for, since try_reserve() or poll() last returned false in this call. For
  /// poll(), only peers that the filter accepts. Empty if all have progressed since. The suspect is the one
  /// furthest behind, since the others may wait for it.
  using PeerFilter = std::function<bool(int peer)>;
  WaitState waiting_on(const PeerFilter&) const;

 private:
  static std::size_t index(int rank) { return static_cast<std::size_t>(rank); }
  const Mailbox& mailbox(int rank) const { return *views_[index(rank)].mailbox; }
  void begin_steps() { first_step_ = next_step_, awaited_ = {}; }
  bool has_acked(int peer, StepNumber before);
  bool spin_for_space() const;
  void write_tag(StepNumber);
  void commit(std::uint32_t slots);
  void wake_sleepers();

  SharedMemoryGroup& shared_memory_;
  const std::vector<MailboxView> views_;
  const int rank_, size_;
  Mailbox& own_;
  CallHistory history_;
  StepNumber next_step_, first_step_;  // first_step_: of the current call
  std::vector<StepNumber> acked_;  // of each peer, as last read: it has acknowledged steps before this one
  StagingCursor staging_;
  bool is_reserved_ = false;  // the next step is reserved
  DeferredAck deferred_;
  Awaited awaited_;
};

// ---- inline: the path of every small call

inline void MailboxChannel::wake_sleepers() {
  if (views_[0].needs_full_fence)
    std::atomic_thread_fence(std::memory_order_seq_cst);
  else
    std::atomic_signal_fence(std::memory_order_seq_cst);  // the sleeper's heavy_fence() orders the processor
  for (int r = 0; r < size_; ++r)
    if (r != rank_ && views_[index(r)].sleeping->load(std::memory_order_relaxed))
      return shared_memory_.wake_peers();
}

inline bool MailboxChannel::has_acked(int peer, StepNumber before) {
  StepNumber& read = acked_[index(peer)];
  if (!is_after(before, read)) return true;
  read = acked_before(mailbox(peer));
  return !is_after(before, read);
}

inline bool MailboxChannel::try_reserve(const Reservation& own) {
  if (!is_reserved_) {
    own.ring_bytes ? staging_.reserve(next_step_, own.ring_bytes)
                   : staging_.reserve_slots(next_step_, own.slots);
    is_reserved_ = true;
  }
  const StepNumber needed = staging_.needed_ack(next_step_, own.writes_ring, own.slots);
  for (int r = 0; r < size_; ++r) {
    if (r == rank_ || has_acked(r, needed)) continue;
    awaited_ = {Awaited::space, needed, r};
    return false;
  }
  return true;
}

inline void MailboxChannel::write_tag(StepNumber step) {
  own_.slots[step % mailbox_depth].tag.store(history_.tag_of(step), std::memory_order_release);
}

inline void MailboxChannel::send() {
  if (!is_reserved_) staging_.reserve_slots(next_step_, 1);
  write_tag(next_step_);
  commit(1);
  prefetch_for_write(&own_.slots[(next_step_ + 2) % mailbox_depth]);  // peers have read it, or soon will
  wake_sleepers();
}

inline void MailboxChannel::send(std::uint32_t slots, const std::byte* from, std::size_t bytes) {
  for (std::uint32_t i = 0; i < slots; ++i) {
    std::byte* const to = payload(rank_, next_step_ + i);
    const std::size_t n = std::min(bytes, inline_bytes);
    n == inline_bytes ? void(std::memcpy(to, from, inline_bytes)) : copy_small(to, from, n);
    write_tag(next_step_ + i);
    from += n, bytes -= n;
  }
  commit(slots);
  for (std::uint32_t i = 0; i < slots; ++i)
    prefetch_for_write(&own_.slots[(next_step_ + slots + i) % mailbox_depth]);
  wake_sleepers();
}

/// Bookkeeping after the tags are stored, while their cache lines travel.
inline void MailboxChannel::commit(std::uint32_t slots) {
  history_.write_to(own_.call_log[next_step_ % mailbox_depth]);
  next_step_ += slots;
  own_.produced.store(next_step_, std::memory_order_release);
  is_reserved_ = false;
}

inline bool MailboxChannel::poll(int peer, StepNumber step) {
  const std::uint64_t there = slot_tag(mailbox(peer), step);
  if (there != history_.tag_of(step)) {
    if (!is_after(step + 1, static_cast<StepNumber>(there)))
      fail_mismatch(views_, rank_, peer, step, next_step_, call());
    awaited_ = {Awaited::slot, step + 1, peer};
    return false;
  }
  if (is_after(first_step_, acked_[index(peer)]))
    acked_[index(peer)] = first_step_;  // implicit ack: it has completed all earlier calls
  return true;
}

inline bool MailboxChannel::poll_all(int& next, StepNumber step) {
  for (; next < size_; ++next)
    if (next != rank_ && !poll(next, step)) return false;
  next = 0;
  return true;
}

inline void MailboxChannel::ack(StepNumber step) {
  deferred_.pending = false;
  own_.acked.store(step, std::memory_order_release);
  wake_sleepers();
}

}  // namespace rz::intranode
