#pragma once
/// Plan of a call: protocol, division into shards and chunks, slots, the window of the staging ring, and
/// which bytes move where. Pure functions. The engine runs them, and the verifier (tests/proof/rank_plans.h).

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "comm/collective.h"
#include "comm/core/integer_math.h"
#include "comm/intranode/mailbox/slot_protocol.h"
#include "comm/transport/mailbox.h"
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

// ---- which bytes of a call move where, on one rank: parts of contributions, inputs and outputs

/// The ranks of a call, as one of them sees it.
struct CallRanks {
  CallRanks() = default;
  CallRanks(Collective kind, int rank, int size, int root);

  /// That rank contributes bytes.
  bool sends(int r) const { return traits(kind).sends(r == root); }
  /// This rank reads contributions of that one.
  bool reads_from(int peer) const { return peer >= first_source && peer < last_source; }

  Collective kind = Collective::barrier;
  int rank = 0, size = 1, root = 0;
  bool is_sender = false;                 ///< sends(rank)
  int first_source = 0, last_source = 0;  ///< the ranks it reads from: [first, last), without itself
};

/// Offsets and lengths in bytes. `by` and `to` are ranks.
struct CallLayout {
  CallRanks ranks;
  std::size_t element_bytes = 1, total_bytes = 0;  ///< of an element; of count_per_rank elements
  const AllToAllVCounts* counts = nullptr;         ///< of an all_to_all_v

  /// True if each rank reduces one shard of an all_reduce.
  bool splits_result(const CallPlan& plan) const {
    return ranks.kind == Collective::all_reduce && plan.per_peer;
  }
  /// Bytes of rank `to`'s shard in this rank's input. They differ in an all_to_all_v, and in an all_reduce in
  /// shards, whose last ones are shorter or empty.
  std::size_t shard_bytes_of(const CallPlan& plan, int to) const {
    if (counts) return counts->send_counts[index(to)] * element_bytes;
    if (!splits_result(plan)) return plan.shard_bytes;
    const std::size_t begin = index(to) * plan.shard_bytes;
    return total_bytes > begin ? std::min(plan.shard_bytes, total_bytes - begin) : 0;
  }
  /// Offset in a rank's input of what it has for rank `to`.
  std::size_t input_offset(const CallPlan& plan, int to) const {
    if (counts) return counts->send_offsets[index(to)] * element_bytes;
    return plan.per_peer ? index(to) * plan.shard_bytes : 0;
  }
  /// Offset in one round's contribution of rank `by` of what it has for rank `to`, another one.
  std::size_t contribution_offset(const CallPlan& plan, int by, int to) const {
    return plan.per_peer ? index(to < by ? to : to - 1) * plan.chunking.chunk_bytes : 0;
  }
  /// Offset in this rank's output of what it gets from rank `by`, or reduces.
  std::size_t output_offset(const CallPlan& plan, int by) const {
    if (counts) return counts->recv_offsets[index(by)] * element_bytes;
    if (splits_result(plan)) return index(ranks.rank) * plan.shard_bytes;
    return traits(ranks.kind).out == Extent::shard_per_rank ? index(by) * plan.shard_bytes : 0;
  }
  /// Bytes of a sender's input.
  std::size_t input_bytes() const {
    return traits(ranks.kind).in == Extent::shard_per_rank ? total_bytes * index(ranks.size) : total_bytes;
  }

  /// This rank's contribution of one round: copy(offset in it, offset in the input, bytes) for each part.
  template <class F>
  void for_each_contributed(const CallPlan& plan, std::size_t round, const F& copy) const {
    const std::size_t at = round * plan.chunking.chunk_bytes;
    if (!plan.per_peer) {
      if (const std::size_t n = plan.chunk_length(plan.shard_bytes, round)) copy(std::size_t{0}, at, n);
      return;
    }
    for (int r = 0; r < ranks.size; ++r) {
      const std::size_t n = r == ranks.rank ? 0 : plan.chunk_length(shard_bytes_of(plan, r), round);
      if (n) copy(contribution_offset(plan, ranks.rank, r), input_offset(plan, r) + at, n);
    }
  }

  /// True if this rank has an output.
  bool has_output() const {
    const CollectiveTraits& t = traits(ranks.kind);
    return t.out != Extent::none && (!t.out_at_root || ranks.rank == ranks.root);
  }
  /// The part of the output that this rank reduces in one round: (offset in the output, offset of its operand
  /// in every rank's input, bytes). For collectives that reduce.
  struct Reduced {
    std::size_t output, input, bytes;
  };
  Reduced reduced(const CallPlan& plan, std::size_t round) const {
    const std::size_t at = round * plan.chunking.chunk_bytes;
    return {output_offset(plan, ranks.rank) + at, input_offset(plan, ranks.rank) + at,
            plan.chunk_length(shard_bytes_of(plan, ranks.rank), round)};
  }
  /// What this rank gets from rank `by` in one round: (offset in the output, offset in that rank's input,
  /// bytes; 0 if nothing). For collectives that only move data.
  struct Moved {
    std::size_t output, input, bytes;
  };
  Moved moved(const CallPlan& plan, int by, std::size_t round) const {
    const std::size_t at = round * plan.chunking.chunk_bytes;
    const std::size_t whole = counts ? counts->recv_counts[index(by)] * element_bytes : plan.shard_bytes;
    return {output_offset(plan, by) + at, input_offset(plan, ranks.rank) + at,
            plan.chunk_length(whole, round)};
  }
  /// The result of rank `by` in one round of a two_shot call; `input` is its offset in that result.
  Moved gathered(const CallPlan& plan, int by, std::size_t round) const {
    return {index(by) * plan.shard_bytes + round * plan.chunking.chunk_bytes, 0,
            plan.chunk_length(shard_bytes_of(plan, by), round)};
  }
  /// Ranks whose data this rank moves to its output: [first, last), with itself.
  int first_moved() const { return traits(ranks.kind).root_sends() ? ranks.root : 0; }
  int last_moved() const { return traits(ranks.kind).root_sends() ? ranks.root + 1 : ranks.size; }

  static std::size_t index(int rank) { return static_cast<std::size_t>(rank); }
};

/// The slots of rank `by`'s contribution of several slots that rank `to` needs: [first, last), from its first
/// step on.
struct SlotRange {
  std::uint32_t first, last;
};
inline SlotRange slots_for(const CallLayout& layout, const CallPlan& plan, int by, int to) {
  const std::size_t begin = layout.contribution_offset(plan, by, to), end = begin + plan.shard_bytes;
  return {static_cast<std::uint32_t>(begin / inline_bytes),
          static_cast<std::uint32_t>(ceil_div(end, inline_bytes))};
}

inline CallRanks::CallRanks(Collective kind, int rank, int size, int root)
    : kind(kind), rank(rank), size(size), root(root), is_sender(sends(rank)), last_source(size) {
  if (!traits(kind).rooted()) return;
  if (traits(kind).root_sends())
    first_source = root, last_source = root + (rank != root);
  else if (rank != root)
    last_source = 0;
}

}  // namespace rz::intranode
