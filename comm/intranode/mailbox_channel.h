#pragma once
/// Slot protocol of the intra-node engine (layout: comm/transport/mailbox.h). Each rank owns a mailbox of 256
/// cache-line slots, a tag and 56 bytes of payload each, which every rank of the node maps. A call consumes
/// the same step numbers on all ranks; step s uses slot s % 256. A rank may reuse a slot once all peers have
/// acknowledged its step. The tag carries a hash of the call history, so a mismatched collective, present or
/// past, is detected at the first slot that is polled.
///
/// Larger payloads go to the rank's staging ring. All ranks reserve the same number of bytes at the same
/// steps, so that each computes all offsets locally and none is transferred.
///
/// Steps are 32-bit numbers that wrap around. Steps that are compared are at most 256 apart.
///
/// Not thread safe: one thread at a time drives a channel. See README.md in this folder.

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "comm/os/spin.h"
#include "comm/transport/mailbox.h"
#include "comm/transport/shared_memory_group.h"
#include "comm/transport/wait_state.h"

namespace rz {

/// Copies a payload of a few dozen bytes inline, in less time than a call of memcpy().
inline void copy_small(std::byte* to, const std::byte* from, std::size_t bytes) {
  for (; bytes >= 8; bytes -= 8, to += 8, from += 8) std::memcpy(to, from, 8);
  if (bytes & 4) std::memcpy(to, from, 4), to += 4, from += 4;
  if (bytes & 2) std::memcpy(to, from, 2), to += 2, from += 2;
  if (bytes & 1) *to = *from;
}

class MailboxChannel {
 public:
  /// Order of two steps that are less than 2^31 apart.
  static bool is_after(std::uint32_t a, std::uint32_t b) { return static_cast<std::int32_t>(a - b) > 0; }

  /// Requires mailboxes(). Steps are counted from `first_step`, the same on every rank.
  /// Unless it is 0, all ranks must have constructed their channels before any of them begins a call.
  MailboxChannel(SharedMemoryGroup&, int rank, int size, std::uint32_t first_step);

  /// Begins a call at next_step(). This rank must have read everything that it needs of earlier calls.
  void begin(const CallSignature&);
  /// begin() of a call that differs from the last one in its sequence number only.
  void begin_repeat(std::uint32_t sequence);
  CallSignature call() const {
    CallSignature call = call_;
    call.sequence = sequence_;
    return call;
  }
  /// Restricts the following reservations to the first `bytes` of the ring. The same on every rank.
  void set_staging_window(std::size_t bytes);
  std::size_t staging_bytes() const { return views_[0].staging_bytes; }
  /// The step of the next slot that this rank writes.
  std::uint32_t next_step() const { return next_step_; }

  /// Reserves the next `slots` slots and `bytes` of the staging ring; the same numbers on every rank. Returns
  /// false while a peer has not acknowledged a slot that this would overwrite, or, if this rank `writes` the
  /// bytes, ring data that they would overwrite; call it again then. Several slots reserve no ring bytes.
  bool try_reserve(std::size_t bytes, bool writes, std::uint32_t slots = 1);
  /// Publishes the slot of next_step(), whose payload and ring bytes are complete. try_reserve() may be
  /// omitted if it has neither and all peers have entered this call.
  void send();
  /// Publishes `slots` slots, one a step, with these bytes as payload. A receiver gets payload and tag in one
  /// cache miss, while ring bytes cost a second one.
  void send(std::uint32_t slots, const std::byte* from, std::size_t bytes);
  /// True once the peer has published that step; its payload and ring bytes can then be read. Throws
  /// Errc::mismatch, naming the first call that differed, if it is among the last 256 steps.
  bool poll(int peer, std::uint32_t step);
  /// Acknowledges all steps before this one: their writers may reuse slots and ring bytes.
  void ack(std::uint32_t step);
  /// Like ack(), but written at most every 16 steps, or before this rank blocks. Only for inline payloads:
  /// the next call's slot acknowledges them implicitly, or their writer does not wait for the ack. Ring bytes
  /// need ack().
  void ack_lazily(std::uint32_t step);
  /// Writes a deferred ack.
  void flush_acks() {
    if (unacked_) ack(unacked_step_);
  }

  std::byte* payload(int rank, std::uint32_t step) const {
    return views_[index(rank)].mailbox->slots[step % mailbox_depth].payload;
  }
  std::byte* bytes(int rank, std::uint32_t step) const {
    return views_[index(rank)].staging_ring + staging_offset_[step % mailbox_depth];
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
  enum class WaitingFor { nothing, space, slot };

  static std::size_t index(int rank) { return static_cast<std::size_t>(rank); }
  void reserve_staging(std::size_t bytes);
  void reserve_inline(std::uint32_t slots);
  void write_tag(std::uint32_t step);
  void commit(std::uint32_t slots);
  void wake_sleepers();
  // Tag: step + 1 in the lower 32 bits, the upper half of the history hash in the upper 32.
  static constexpr int history_shift = 32;
  std::uint64_t tag_of(std::uint32_t step) const {
    return (call_history_hash_ >> history_shift << history_shift) | static_cast<std::uint32_t>(step + 1);
  }
  std::uint32_t acked(int rank) const {
    return views_[index(rank)].mailbox->acked.load(std::memory_order_acquire);
  }
  /// One more than the last step that the rank has published.
  std::uint32_t produced(int rank) const {
    return views_[index(rank)].mailbox->produced.load(std::memory_order_acquire);
  }
  std::uint64_t slot_tag(int rank, std::uint32_t step) const {
    return views_[index(rank)].mailbox->slots[step % mailbox_depth].tag.load(std::memory_order_acquire);
  }
  bool begins_call(int rank, std::uint32_t step) const;
  [[noreturn]] void mismatch(int peer, std::uint32_t step) const;

  SharedMemoryGroup& shared_memory_;
  const std::vector<MailboxView> views_;
  const int rank_, size_;
  Mailbox& own_;
  // The sequence number is apart: a store of one field followed by a load of the whole signature is slow.
  CallSignature call_;
  std::uint32_t sequence_ = 0;
  std::uint64_t call_hash_ = 0;  // of call_, without the sequence number
  // Hash of all calls up to this one. Histories that differed once differ from then on, so that a rank
  // detects a mismatch even if it polls the peer's slots much later.
  std::uint64_t call_history_hash_ = 0;
  std::uint32_t next_step_, first_step_;  // first_step_: of the current call
  std::vector<std::uint32_t> acked_;  // of each peer, as last read: it has acknowledged steps before this one

  std::array<std::uint32_t, mailbox_depth> staging_offset_{};  // of the last 256 steps, bytes
  bool is_reserved_ = false;                                   // the next step is reserved
  std::size_t staging_cursor_ = 0, staging_window_;            // bytes of the ring
  std::uint32_t lap_begin_;                                    // first step of the current lap of the ring
  std::uint32_t overwritten_before_;  // ring bytes of steps before this one overlap the next step's

  bool unacked_ = false;  // an ack is deferred
  std::uint32_t unacked_step_ = 0;

  WaitingFor waiting_for_ = WaitingFor::nothing;  // why try_reserve() or poll() last returned false
  std::uint32_t awaited_step_ = 0;                // the step that peers must have acknowledged or published
  int awaited_peer_ = -1;                         // the first peer that had not
};

// ---- inline: the path of every small call

inline void MailboxChannel::begin_repeat(std::uint32_t sequence) {
  sequence_ = sequence;
  call_history_hash_ = (call_history_hash_ ^ call_hash_) * 0x9e3779b97f4a7c15u;
  call_history_hash_ ^= call_history_hash_ >> 29;
  first_step_ = next_step_;
  waiting_for_ = WaitingFor::nothing, awaited_peer_ = -1;
}

inline void MailboxChannel::wake_sleepers() {
  if (views_[0].needs_full_fence)
    std::atomic_thread_fence(std::memory_order_seq_cst);
  else
    std::atomic_signal_fence(std::memory_order_seq_cst);  // the sleeper's heavy_fence() orders the processor
  for (int r = 0; r < size_; ++r)
    if (r != rank_ && views_[index(r)].sleeping->load(std::memory_order_relaxed))
      return shared_memory_.wake_peers();
}

inline void MailboxChannel::reserve_inline(std::uint32_t slots) {
  // Every 32 steps, so that lap_begin_ and overwritten_before_ stay within the last 256 steps.
  if (((next_step_ - 1) ^ (next_step_ + slots - 1)) >= 32) reserve_staging(0);
  is_reserved_ = true;
  std::uint32_t step = next_step_;
  do staging_offset_[step % mailbox_depth] = static_cast<std::uint32_t>(staging_cursor_);
  while (++step != next_step_ + slots);
}

inline bool MailboxChannel::try_reserve(std::size_t bytes, bool writes, std::uint32_t slots) {
  if (!is_reserved_) bytes ? reserve_staging(bytes) : reserve_inline(slots);
  std::uint32_t needed = next_step_ + slots - static_cast<std::uint32_t>(mailbox_depth);
  if (writes && is_after(overwritten_before_, needed)) needed = overwritten_before_;
  for (int r = 0; r < size_; ++r) {
    std::uint32_t& read = acked_[index(r)];
    if (r == rank_ || !is_after(needed, read)) continue;
    read = acked(r);
    if (!is_after(needed, read)) continue;
    waiting_for_ = WaitingFor::space, awaited_step_ = needed, awaited_peer_ = r;
    return false;
  }
  return true;
}

inline void MailboxChannel::write_tag(std::uint32_t step) {
  own_.slots[step % mailbox_depth].tag.store(tag_of(step), std::memory_order_release);
}

inline void MailboxChannel::send() {
  if (!is_reserved_) reserve_inline(1);
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
  CallSignature& called = own_.call_log[next_step_ % mailbox_depth];
  called = call_, called.sequence = sequence_;
  next_step_ += slots;
  own_.produced.store(next_step_, std::memory_order_release);
  is_reserved_ = false;
}

inline bool MailboxChannel::poll(int peer, std::uint32_t step) {
  const std::uint64_t there = slot_tag(peer, step);
  if (there != tag_of(step)) {
    if (!is_after(step + 1, static_cast<std::uint32_t>(there))) mismatch(peer, step);
    waiting_for_ = WaitingFor::slot, awaited_step_ = step + 1, awaited_peer_ = peer;
    return false;
  }
  if (is_after(first_step_, acked_[index(peer)]))
    acked_[index(peer)] = first_step_;  // implicit ack: it has completed all earlier calls
  return true;
}

inline void MailboxChannel::ack_lazily(std::uint32_t step) {
  const bool is_time = (unacked_step_ ^ step) >= 16;
  unacked_ = true, unacked_step_ = step;
  if (is_time) flush_acks();
}

inline void MailboxChannel::ack(std::uint32_t step) {
  unacked_ = false;
  own_.acked.store(step, std::memory_order_release);
  wake_sleepers();
}

}  // namespace rz
