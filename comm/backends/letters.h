#pragma once
/// The steps of one rank in the meeting place of its host (comm/transports/meeting.h): it writes a letter at
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

#include "comm/core/pause.h"
#include "comm/transports/meeting.h"
#include "comm/transports/transport.h"

namespace rz {

/// Of a letter's payload, which takes less time than a call of memcpy().
inline void copy_few(std::byte* to, const std::byte* from, std::size_t bytes) {
  for (; bytes >= 8; bytes -= 8, to += 8, from += 8) std::memcpy(to, from, 8);
  if (bytes & 4) std::memcpy(to, from, 4), to += 4, from += 4;
  if (bytes & 2) std::memcpy(to, from, 2), to += 2, from += 2;
  if (bytes & 1) *to = *from;
}

class Letters {
 public:
  /// Of two steps that meet.
  static bool is_after(std::uint32_t a, std::uint32_t b) { return static_cast<std::int32_t>(a - b) > 0; }

  /// Of a transport that has a meeting(). Steps are counted from `first_step`, on every rank the same; unless
  /// it is 0, all ranks must have come so far before any of them begins a call.
  Letters(Transport&, int rank, int size, std::uint32_t first_step);

  /// A call begins at next(), after all that the calls before needed was read.
  void begin(const Signature&);
  /// One like the last, but for its number.
  void begin_again(std::uint32_t sequence);
  Signature call() const {
    Signature call = call_;
    call.sequence = sequence_;
    return call;
  }
  /// The bytes of the ring that the next calls take turns in. The same on every rank.
  void use_ring(std::size_t bytes);
  std::size_t ring_bytes() const { return views_[0].ring_bytes; }
  /// The step of the next letter.
  std::uint32_t next() const { return next_; }

  /// Lays out the next letter's bytes in the ring; the same number on every rank. Whether everybody has read
  /// what it overwrites, and what lies there, if this rank `writes` there.
  /// Of several letters in a row, none has bytes.
  bool has_room(std::size_t bytes, bool writes, std::uint32_t letters = 1);
  /// Writes the letter of next(), whose payload and bytes are filled; without has_room(), if it has none of
  /// either and all peers have come to this call.
  void publish();
  /// Writes so many letters, one a step, with these bytes in their payloads: fetched at once by who looks for
  /// them, while bytes in the ring are fetched after their letter.
  void publish(std::uint32_t letters, const std::byte* from, std::size_t bytes);
  /// Whether the peer has written that letter; then its payload and bytes can be read. Throws Errc::mismatch,
  /// naming the first call that differed, as far back as letters are kept.
  bool arrived(int peer, std::uint32_t step);
  /// What peers offered at steps before this one is not needed.
  void have_read_up_to(std::uint32_t step);
  /// The same, said now and then, or when this rank has to wait: of letters alone, whose writer either learns
  /// it from the next call's letter or need not know sooner. What lies in rings is said at once.
  void have_read_by(std::uint32_t step);
  /// Says what was not said yet.
  void say_all() {
    if (unsaid_) have_read_up_to(unsaid_up_to_);
  }

  std::byte* payload(int rank, std::uint32_t step) const {
    return views_[index(rank)].place->letters[step % meeting_letters].payload;
  }
  std::byte* bytes(int rank, std::uint32_t step) const {
    return views_[index(rank)].ring + laid_[step % meeting_letters];
  }

  /// Looks a little while for that for which has_room() or arrived() was last false.
  void look_out();
  /// This rank cannot go on without the peer that was missing last: a failure, if that one has left.
  void claim();

  /// Who holds this rank back, of the peers for whose letters it looks: since has_room() or arrived() was
  /// last false in this call. May be nobody, if news came meanwhile.
  using Looks = std::function<bool(int peer)>;
  std::vector<int> missing(const Looks&) const;
  /// Of several, who is furthest behind: the others may wait for it themselves. -1: nobody was ever missing.
  int culprit(const Looks&) const;
  /// For messages: "rank 1 to send, rank 2 to send".
  std::string waiting_for(const Looks&) const;

 private:
  enum class Awaits { nothing, room, letter };

  static std::size_t index(int rank) { return static_cast<std::size_t>(rank); }
  void lay_out(std::size_t bytes);
  void lay_out_none(std::uint32_t letters);
  void write_tag(std::uint32_t step);
  void conclude(std::uint32_t letters);
  void tell();
  // A letter's tag: its step + 1 in the lower half, the upper half of the history in the upper one.
  static constexpr int history_shift = 32;
  std::uint64_t tag_of(std::uint32_t step) const {
    return (history_ >> history_shift << history_shift) | static_cast<std::uint32_t>(step + 1);
  }
  std::uint32_t has_read(int rank) const {
    return views_[index(rank)].place->read.load(std::memory_order_acquire);
  }
  /// One more than the last step at which it wrote a letter.
  std::uint32_t latest(int rank) const {
    return views_[index(rank)].place->written.load(std::memory_order_acquire);
  }
  std::uint64_t tag(int rank, std::uint32_t step) const {
    return views_[index(rank)].place->letters[step % meeting_letters].tag.load(std::memory_order_acquire);
  }
  bool begins_call(int rank, std::uint32_t step) const;
  [[noreturn]] void mismatch(int peer, std::uint32_t step) const;

  Transport& transport_;
  const std::vector<MeetingView> views_;
  const int rank_, size_;
  MeetingPlace& own_;
  Signature call_;  // but for its number: what is written byte by byte is slow to read whole
  std::uint32_t sequence_ = 0;
  std::uint64_t hash_ = 0;     // of the call, but for its number
  std::uint64_t history_ = 0;  // a hash of all calls up to this one, so that ranks that once differed differ
                               // ever after: who looks at another's letter late still learns of it
  std::uint32_t next_, first_;
  std::vector<std::uint32_t> read_;  // of each peer, as last seen: steps before this one

  std::array<std::uint32_t, meeting_letters> laid_{};  // where the bytes of the last steps begin
  bool is_laid_ = false;                               // the next step, too
  std::size_t cursor_ = 0, in_use_;                    // bytes of the ring
  std::uint32_t lap_;                                  // the step at which the ring began anew
  std::uint32_t over_;  // steps before this one lie where the next one's bytes will

  bool unsaid_ = false;  // that it has read
  std::uint32_t unsaid_up_to_ = 0;

  Awaits awaits_ = Awaits::nothing;  // when it last could not go on
  std::uint32_t awaited_ = 0;        // what peers must have read, or written letters up to
  int lacking_ = -1;                 // the first of those that had not
};

// ---- what every tiny call runs through

inline void Letters::begin_again(std::uint32_t sequence) {
  sequence_ = sequence;
  history_ = (history_ ^ hash_) * 0x9e3779b97f4a7c15u;
  history_ ^= history_ >> 29;
  first_ = next_;
  awaits_ = Awaits::nothing, lacking_ = -1;
}

inline void Letters::tell() {
  if (views_[0].fences)
    std::atomic_thread_fence(std::memory_order_seq_cst);
  else
    std::atomic_signal_fence(std::memory_order_seq_cst);  // who goes to sleep does the processor's part
  for (int r = 0; r < size_; ++r)
    if (r != rank_ && views_[index(r)].asleep->load(std::memory_order_relaxed)) return transport_.nudge();
}

inline void Letters::lay_out_none(std::uint32_t letters) {
  // Now and then, so that what it keeps does not fall behind.
  if (((next_ - 1) ^ (next_ + letters - 1)) >= 32) lay_out(0);
  is_laid_ = true;
  std::uint32_t step = next_;
  do laid_[step % meeting_letters] = static_cast<std::uint32_t>(cursor_);
  while (++step != next_ + letters);
}

inline bool Letters::has_room(std::size_t bytes, bool writes, std::uint32_t letters) {
  if (!is_laid_) bytes ? lay_out(bytes) : lay_out_none(letters);
  std::uint32_t needed = next_ + letters - static_cast<std::uint32_t>(meeting_letters);
  if (writes && is_after(over_, needed)) needed = over_;
  for (int r = 0; r < size_; ++r) {
    std::uint32_t& read = read_[index(r)];
    if (r == rank_ || !is_after(needed, read)) continue;
    read = has_read(r);
    if (!is_after(needed, read)) continue;
    awaits_ = Awaits::room, awaited_ = needed, lacking_ = r;
    return false;
  }
  return true;
}

inline void Letters::write_tag(std::uint32_t step) {
  own_.letters[step % meeting_letters].tag.store(tag_of(step), std::memory_order_release);
}

inline void Letters::publish() {
  if (!is_laid_) lay_out_none(1);
  write_tag(next_);
  conclude(1);
  expect_to_write(&own_.letters[(next_ + 2) % meeting_letters]);  // all have read it, or soon will
  tell();
}

inline void Letters::publish(std::uint32_t letters, const std::byte* from, std::size_t bytes) {
  for (std::uint32_t i = 0; i < letters; ++i) {
    std::byte* const to = payload(rank_, next_ + i);
    const std::size_t n = std::min(bytes, letter_bytes);
    n == letter_bytes ? void(std::memcpy(to, from, letter_bytes)) : copy_few(to, from, n);
    write_tag(next_ + i);
    from += n, bytes -= n;
  }
  conclude(letters);
  for (std::uint32_t i = 0; i < letters; ++i)
    expect_to_write(&own_.letters[(next_ + letters + i) % meeting_letters]);
  tell();
}

/// What is done while letters are on their way.
inline void Letters::conclude(std::uint32_t letters) {
  Signature& called = own_.calls[next_ % meeting_letters];
  called = call_, called.sequence = sequence_;
  next_ += letters;
  own_.written.store(next_, std::memory_order_release);
  is_laid_ = false;
}

inline bool Letters::arrived(int peer, std::uint32_t step) {
  const std::uint64_t there = tag(peer, step);
  if (there != tag_of(step)) {
    if (!is_after(step + 1, static_cast<std::uint32_t>(there))) mismatch(peer, step);
    awaits_ = Awaits::letter, awaited_ = step + 1, lacking_ = peer;
    return false;
  }
  if (is_after(first_, read_[index(peer)])) read_[index(peer)] = first_;  // it has ended all calls before
  return true;
}

inline void Letters::have_read_by(std::uint32_t step) {
  const bool is_time = (unsaid_up_to_ ^ step) >= 16;
  unsaid_ = true, unsaid_up_to_ = step;
  if (is_time) say_all();
}

inline void Letters::have_read_up_to(std::uint32_t step) {
  unsaid_ = false;
  own_.read.store(step, std::memory_order_release);
  tell();
}

}  // namespace rz
