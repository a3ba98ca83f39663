#pragma once
/// Where the memory of a call lies, as the ranks of one host tell each other in one letter each: in a segment
/// that peers map, in the rank's own process, where the kernel reads it, or where nobody else reaches it.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "comm/backends/way_by_time.h"
#include "comm/transports/arena.h"
#include "comm/transports/meeting.h"
#include "comm/transports/transport.h"

namespace rz {

/// What a letter says.
struct MemoryOffer {
  static constexpr std::uint32_t nowhere = 0xffffffff, own_process = 0xfffffffe;  ///< for a segment's number
  SharedSpot in{nowhere, 0};   ///< what peers read; in its own process: the address there
  SharedSpot out{nowhere, 0};  ///< what peers write
  bool reads = false;          ///< this rank, what lies in others' processes
  WayByTime::Times took;       ///< its calls, if all choose by it
  bool operator==(const MemoryOffer&) const = default;
};
static_assert(sizeof(MemoryOffer) <= letter_bytes);

/// A rank's own memory of a call; null where peers need nothing of it.
struct OwnMemory {
  std::span<const std::byte> in, out;
};

class MemoryOffers {
 public:
  MemoryOffers(Transport&, int rank, int size);

  /// This rank's. `by_kernel`: what lies in no segment may be read through the kernel.
  void make(const OwnMemory&, bool by_kernel, WayByTime::Times took);
  /// That memory lies where it did. What was freed or is shared since then, at the same addresses, has
  /// changed the arena's version.
  bool is_still_true(const OwnMemory& m) const {
    return m.in.data() == own_.in.data() && m.out.data() == own_.out.data() && arena_->version() == version_;
  }
  void write(std::byte* payload) const { std::memcpy(payload, &offers_[index(rank_)], sizeof(MemoryOffer)); }
  /// A peer's; whether it is another than the last.
  bool hear(int peer, const std::byte* payload) {
    MemoryOffer now;
    std::memcpy(&now, payload, sizeof now);
    if (now == offers_[index(peer)]) return false;
    offers_[index(peer)] = now;
    return true;
  }

  bool shares_in(int rank) const { return is_shared(offers_[index(rank)].in); }
  bool shares_out(int rank) const { return is_shared(offers_[index(rank)].out); }
  bool has_readable_in(int rank) const { return offers_[index(rank)].in.segment != MemoryOffer::nowhere; }
  bool reads(int rank) const { return offers_[index(rank)].reads; }
  /// Of all ranks together.
  void sum_times(std::uint64_t& once_ns, std::uint64_t& staged_ns) const;

  /// Finds what that peer shares, so many bytes of it, for in() and out(). Errc::system if it lies nowhere.
  void reach_in(int peer, std::size_t bytes) { ins_[index(peer)] = reached(peer, in_of(peer), bytes); }
  void reach_out(int peer, std::size_t bytes) { outs_[index(peer)] = reached(peer, out_of(peer), bytes); }
  const std::byte* in(int peer) const { return ins_[index(peer)]; }
  std::byte* out(int peer) const { return outs_[index(peer)]; }
  /// Where a part of what a peer shares lies here; null: it lies in its own process, for read().
  const std::byte* find_in(int peer, std::size_t at, std::size_t bytes);
  /// That, through the kernel.
  PeerRead read(int peer, std::size_t at, std::span<std::byte> into);

 private:
  static std::size_t index(int rank) { return static_cast<std::size_t>(rank); }
  static bool is_shared(const SharedSpot& s) { return s.segment < MemoryOffer::own_process; }
  const SharedSpot& in_of(int rank) const { return offers_[index(rank)].in; }
  const SharedSpot& out_of(int rank) const { return offers_[index(rank)].out; }
  SharedSpot find(std::span<const std::byte>, bool by_kernel) const;
  std::byte* reached(int peer, const SharedSpot&, std::size_t bytes);

  Transport& transport_;
  const std::shared_ptr<Arena> arena_;
  const int rank_;
  std::vector<MemoryOffer> offers_;  // of every rank, as last made or heard
  OwnMemory own_;                    // of which this rank's is
  std::uint64_t version_ = 0;        // the arena's then
  std::vector<std::byte*> ins_, outs_;
};

}  // namespace rz
