#pragma once
/// Plan of a call: protocol, division into shards and chunks, slots, and the window of the staging ring. Pure
/// functions of values that are the same on every rank. The engine runs them, and the verifier
/// (tests/proof/rank_plans.h).

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "comm/collective.h"
#include "comm/intranode/mailbox/slot_protocol.h"
#include "comm/tuning/intranode.h"

namespace rz::intranode {

enum class Protocol : std::uint8_t { one_shot, two_shot, zero_copy, single_copy };

/// Payloads up to 2 slots (112 B) are sent inline; beyond that the staging ring is faster. Rooted collectives
/// use at most one slot, since receivers usually find the root's ring bytes already complete.
inline constexpr std::size_t max_inline_slots = 2;
/// Zero-copy chunk: bytes processed between two polls of control traffic.
inline constexpr std::size_t zero_copy_chunk = 128 << 10;
/// Single-copy chunk: larger, since each system call has a fixed cost.
inline constexpr std::size_t single_copy_chunk = 1 << 20;

/// The staging ring as chunk sizes see it.
struct StagingLimits {
  std::size_t staging_bytes = 0;  ///< that calls are chunked for
  bool oversubscribed = false;
};

/// Division of a shard into chunks; the last one may be shorter.
struct Chunking {
  std::size_t chunk_bytes = 1, chunks = 1;
};

/// A shard is what a rank has for each peer (per_peer), reduces (two_shot, or all_reduce by zero_copy), or
/// else its whole contribution. A round moves one chunk of every shard.
struct CallPlan {
  Protocol protocol = Protocol::one_shot;
  bool per_peer = false;           ///< each peer reads a shard of its own
  std::uint32_t inline_slots = 0;  ///< slots of a contribution; 0: it goes to the staging ring
  std::size_t shard_bytes = 0;
  Chunking chunking;

  /// Steps of a contribution.
  std::uint32_t slots() const { return std::max(inline_slots, 1u); }
  /// Bytes of that round's chunk of a shard of `shard` bytes: fewer in the last round.
  std::size_t chunk_length(std::size_t shard, std::size_t round) const {
    const std::size_t at = round * chunking.chunk_bytes;
    return shard > at ? std::min(chunking.chunk_bytes, shard - at) : 0;
  }
  /// Bytes of the staging ring that a contribution of one round occupies.
  std::size_t ring_bytes(int size) const {
    if (inline_slots) return 0;
    return per_peer ? chunking.chunk_bytes * (static_cast<std::size_t>(size) - 1) : chunking.chunk_bytes;
  }
  Reservation contribution_reservation(int size, bool is_sender) const {
    const std::size_t bytes = ring_bytes(size);
    return {bytes, bytes > 0 && is_sender, slots()};
  }
  /// Room for the shard that a rank has reduced (two_shot).
  Reservation result_reservation() const { return {chunking.chunk_bytes, true}; }
};

/// Plan of a staged call. `bytes_per_rank`: bytes of count_per_rank() elements; 0 for all_to_all_v.
CallPlan plan_call(Collective, std::size_t bytes_per_rank, int size, const tuning::IntranodeAlgorithm&,
                   const StagingLimits&);
/// Plan of a call that accesses buffers in place: zero_copy or single_copy.
CallPlan plan_in_place(Protocol, Collective, std::size_t bytes_per_rank, int size);
/// Chunks of plan.shard_bytes through the staging ring. `chunk`: bytes by the tuning rule; 0: chosen here.
Chunking chunk_shard(const CallPlan&, int size, std::size_t chunk, const StagingLimits&);
/// Bytes of a rank's shard of an all_reduce of `bytes`, a multiple of 64; the last shards may be shorter.
std::size_t shard_bytes(std::size_t bytes, int size);
/// Room for the counts of an all_to_all_v: one for each rank.
constexpr Reservation count_reservation(int size) {
  return {static_cast<std::size_t>(size) * sizeof(std::size_t), true};
}
/// Room for a handle, which is the payload of one slot.
inline constexpr Reservation handle_reservation;
/// Bytes of the staging ring, of `ring_bytes`, that the reservations of a call are restricted to.
std::size_t staging_window(const CallPlan&, Collective, int size, const StagingLimits&,
                           std::size_t ring_bytes);
/// Whether ranks may defer the acknowledgement of a completed call (MailboxChannel::ack_lazily()): no writer
/// needs it before the slots of 256 steps are full. For ring bytes that holds if 256 such calls fit the ring
/// and the root alone writes it.
bool may_defer_ack(const CallPlan&, Collective, int size, std::size_t ring_bytes);
/// What plan_call() may use of a staging ring of that size.
StagingLimits staging_limits(std::size_t ring_bytes, bool oversubscribed);

}  // namespace rz::intranode
