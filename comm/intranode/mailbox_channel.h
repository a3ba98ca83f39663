#pragma once
/// The steps of one rank in the meeting place of its host (comm/transport/mailbox.h): it writes a letter at
/// every step, over one that all have read; reads those of its peers; and says how far it has read. Peers
/// that made other calls, now or ever before, are found out by the first of their letters that is looked at.
///
/// What a letter does not hold lies in its rank's ring of bytes. Where, every rank knows by itself: all lay
/// out the same numbers of bytes at the same steps.
///
/// Steps are numbers of 32 bits that wrap around; two that meet are never further apart than letters are
/// kept.

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "comm/os/spin.h"
#include "comm/transport/mailbox.h"
#include "comm/transport/transport.h"

namespace rz {

/// Of a letter's payload, which takes less time than a call of memcpy().
inline void copy_small(std::byte* to, const std::byte* from, std::size_t bytes) {
  for (; bytes >= 8; bytes -= 8, to += 8, from += 8) std::memcpy(to, from, 8);
  if (bytes & 4) std::memcpy(to, from, 4), to += 4, from += 4;
  if (bytes & 2) std::memcpy(to, from, 2), to += 2, from += 2;
  if (bytes & 1) *to = *from;
}

class MailboxChannel {
 public:
  /// Of two steps that meet.
  static bool is_after(std::uint32_t a, std::uint32_t b) { return static_cast<std::int32_t>(a - b) > 0; }

  /// Of a transport that has a meeting(). Steps are counted from `first_step`, on every rank the same; unless
  /// it is 0, all ranks must have come so far before any of them begins a call.
  MailboxChannel(Transport&, int rank, int size, std::uint32_t first_step);

  /// A call begins at next(), after all that the calls before needed was read.
  void begin(const CallSignature&);
  /// One like the last, but for its number.
  void begin_repeat(std::uint32_t sequence);
  CallSignature call() const {
    CallSignature call = call_;
    call.sequence = sequence_;
    return call;
  }
  /// The bytes of the ring that the next calls take turns in. The same on every rank.
  void set_staging_window(std::size_t bytes);
  std::size_t staging_bytes() const { return views_[0].staging_bytes; }
  /// The step of the next letter.
  std::uint32_t next_step() const { return next_step_; }

  /// Lays out the next letter's bytes in the ring; the same number on every rank. Whether everybody has read
  /// what it overwrites, and what lies there, if this rank `writes` there.
  /// Of several letters in a row, none has bytes.
  bool try_reserve(std::size_t bytes, bool writes, std::uint32_t letters = 1);
  /// Writes the letter of next(), whose payload and bytes are filled; without has_room(), if it has none of
  /// either and all peers have come to this call.
  void send();
  /// Writes so many letters, one a step, with these bytes in their payloads: fetched at once by who looks for
  /// them, while bytes in the ring are fetched after their letter.
  void send(std::uint32_t letters, const std::byte* from, std::size_t bytes);
  /// Whether the peer has written that letter; then its payload and bytes can be read. Throws Errc::mismatch,
  /// naming the first call that differed, as far back as letters are kept.
  bool poll(int peer, std::uint32_t step);
  /// What peers offered at steps before this one is not needed.
  void ack(std::uint32_t step);
  /// The same, said now and then, or when this rank has to wait: of letters alone, whose writer either learns
  /// it from the next call's letter or need not know sooner. What lies in rings is said at once.
  void ack_lazily(std::uint32_t step);
  /// Says what was not said yet.
  void flush_acks() {
    if (unacked_) ack(unacked_step_);
  }

  std::byte* payload(int rank, std::uint32_t step) const {
    return views_[index(rank)].mailbox->slots[step % mailbox_depth].payload;
  }
  std::byte* bytes(int rank, std::uint32_t step) const {
    return views_[index(rank)].staging_ring + staging_offset_[step % mailbox_depth];
  }

  /// Looks a little while for that for which has_room() or arrived() was last false.
  void spin_once();
  /// This rank cannot go on without the peer that was missing last: a failure, if that one has left.
  void check_peer_alive();

  /// Who holds this rank back, of the peers for whose letters it looks: since has_room() or arrived() was
  /// last false in this call. May be nobody, if news came meanwhile.
  using PeerFilter = std::function<bool(int peer)>;
  std::vector<int> missing_peers(const PeerFilter&) const;
  /// Of several, who is furthest behind: the others may wait for it themselves. -1: nobody was ever missing.
  int culprit(const PeerFilter&) const;
  /// For messages: "rank 1 to send, rank 2 to send".
  std::string waiting_for(const PeerFilter&) const;

 private:
  enum class WaitingFor { nothing, space, slot };

  static std::size_t index(int rank) { return static_cast<std::size_t>(rank); }
  void reserve_staging(std::size_t bytes);
  void reserve_inline(std::uint32_t letters);
  void write_tag(std::uint32_t step);
  void commit(std::uint32_t letters);
  void wake_sleepers();
  // A letter's tag: its step + 1 in the lower half, the upper half of the history in the upper one.
  static constexpr int history_shift = 32;
  std::uint64_t tag_of(std::uint32_t step) const {
    return (call_history_hash_ >> history_shift << history_shift) | static_cast<std::uint32_t>(step + 1);
  }
  std::uint32_t acked(int rank) const {
    return views_[index(rank)].mailbox->acked.load(std::memory_order_acquire);
  }
  /// One more than the last step at which it wrote a letter.
  std::uint32_t produced(int rank) const {
    return views_[index(rank)].mailbox->produced.load(std::memory_order_acquire);
  }
  std::uint64_t slot_tag(int rank, std::uint32_t step) const {
    return views_[index(rank)].mailbox->slots[step % mailbox_depth].tag.load(std::memory_order_acquire);
  }
  bool begins_call(int rank, std::uint32_t step) const;
  [[noreturn]] void mismatch(int peer, std::uint32_t step) const;

  Transport& transport_;
  const std::vector<MailboxView> views_;
  const int rank_, size_;
  Mailbox& own_;
  CallSignature call_;  // but for its number: what is written byte by byte is slow to read whole
  std::uint32_t sequence_ = 0;
  std::uint64_t call_hash_ = 0;  // of the call, but for its number
  std::uint64_t call_history_hash_ =
      0;  // a hash of all calls up to this one, so that ranks that once differed differ
          // ever after: who looks at another's letter late still learns of it
  std::uint32_t next_step_, first_step_;
  std::vector<std::uint32_t> acked_;  // of each peer, as last seen: steps before this one

  std::array<std::uint32_t, mailbox_depth> staging_offset_{};  // where the bytes of the last steps begin
  bool is_reserved_ = false;                                   // the next step, too
  std::size_t staging_cursor_ = 0, staging_window_;            // bytes of the ring
  std::uint32_t lap_begin_;                                    // the step at which the ring began anew
  std::uint32_t overwritten_before_;  // steps before this one lie where the next one's bytes will

  bool unacked_ = false;  // that it has read
  std::uint32_t unacked_step_ = 0;

  WaitingFor waiting_for_ = WaitingFor::nothing;  // when it last could not go on
  std::uint32_t awaited_step_ = 0;                // what peers must have read, or written letters up to
  int awaited_peer_ = -1;                         // the first of those that had not
};

// ---- what every tiny call runs through

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
    std::atomic_signal_fence(std::memory_order_seq_cst);  // who goes to sleep does the processor's part
  for (int r = 0; r < size_; ++r)
    if (r != rank_ && views_[index(r)].sleeping->load(std::memory_order_relaxed))
      return transport_.wake_peers();
}

inline void MailboxChannel::reserve_inline(std::uint32_t letters) {
  // Now and then, so that what it keeps does not fall behind.
  if (((next_step_ - 1) ^ (next_step_ + letters - 1)) >= 32) reserve_staging(0);
  is_reserved_ = true;
  std::uint32_t step = next_step_;
  do staging_offset_[step % mailbox_depth] = static_cast<std::uint32_t>(staging_cursor_);
  while (++step != next_step_ + letters);
}

inline bool MailboxChannel::try_reserve(std::size_t bytes, bool writes, std::uint32_t letters) {
  if (!is_reserved_) bytes ? reserve_staging(bytes) : reserve_inline(letters);
  std::uint32_t needed = next_step_ + letters - static_cast<std::uint32_t>(mailbox_depth);
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
  prefetch_for_write(&own_.slots[(next_step_ + 2) % mailbox_depth]);  // all have read it, or soon will
  wake_sleepers();
}

inline void MailboxChannel::send(std::uint32_t letters, const std::byte* from, std::size_t bytes) {
  for (std::uint32_t i = 0; i < letters; ++i) {
    std::byte* const to = payload(rank_, next_step_ + i);
    const std::size_t n = std::min(bytes, inline_bytes);
    n == inline_bytes ? void(std::memcpy(to, from, inline_bytes)) : copy_small(to, from, n);
    write_tag(next_step_ + i);
    from += n, bytes -= n;
  }
  commit(letters);
  for (std::uint32_t i = 0; i < letters; ++i)
    prefetch_for_write(&own_.slots[(next_step_ + letters + i) % mailbox_depth]);
  wake_sleepers();
}

/// What is done while letters are on their way.
inline void MailboxChannel::commit(std::uint32_t letters) {
  CallSignature& called = own_.call_log[next_step_ % mailbox_depth];
  called = call_, called.sequence = sequence_;
  next_step_ += letters;
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
    acked_[index(peer)] = first_step_;  // it has ended all calls before
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
