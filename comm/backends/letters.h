#pragma once
/// The steps of one rank in the meeting place of its host (comm/transports/meeting.h): it writes a letter at
/// every step, over one that all have read; reads those of its peers; and says how far it has read. Peers
/// that made other calls, now or ever before, are found out by the first of their letters that is looked at.
///
/// Steps are numbers of 32 bits that wrap around; two that meet are never further apart than letters are
/// kept.

#include <functional>
#include <string>
#include <vector>

#include "comm/transports/meeting.h"

namespace rz {

class Letters {
 public:
  /// Of two steps that meet.
  static bool is_after(std::uint32_t a, std::uint32_t b) { return static_cast<std::int32_t>(a - b) > 0; }

  /// Of a transport that has a meeting(). Steps are counted from `first_step`, on every rank the same; unless
  /// it is 0, all ranks must have come so far before any of them begins a call.
  Letters(Transport&, int rank, int size, std::uint32_t first_step);

  /// A call begins at next(), after all that the calls before needed was read.
  void begin(const Signature&);
  /// The step of the next letter.
  std::uint32_t next() const { return next_; }

  /// Whether everybody has read what the next letter overwrites, and its slot, if `in_slot`.
  bool has_room(bool in_slot);
  /// Writes the letter of next(), whose payload and slot are filled.
  void publish();
  /// Whether the peer has written that letter; then its payload and slot can be read. Throws Errc::mismatch,
  /// naming the first call that differed, as far back as letters are kept.
  bool arrived(int peer, std::uint32_t step);
  /// What peers offered at steps before this one is not needed.
  void have_read_up_to(std::uint32_t step);

  std::byte* payload(int rank, std::uint32_t step) const {
    return views_[index(rank)].place->letters[step % meeting_letters].payload;
  }
  std::byte* slot(int rank, std::uint32_t step) const { return views_[index(rank)].slot(step); }
  std::size_t slot_bytes() const { return views_[0].slot_bytes; }

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
  std::uint64_t tag_of(std::uint32_t step) const;
  std::uint32_t has_read(int rank) const;
  std::uint32_t latest(int rank) const;
  [[noreturn]] void mismatch(int peer) const;

  Transport& transport_;
  const std::vector<MeetingView> views_;
  const int rank_, size_;
  Signature call_;
  std::uint64_t history_ = 0;  // a hash of all calls
  std::uint32_t next_, first_;
  std::vector<std::uint32_t> read_;  // of each peer, as last seen: steps before this one
  Awaits awaits_ = Awaits::nothing;  // when it last could not go on
  std::uint32_t awaited_ = 0;        // what peers must have read, or written letters up to
  int lacking_ = -1;                 // the first of those that had not
};

}  // namespace rz
