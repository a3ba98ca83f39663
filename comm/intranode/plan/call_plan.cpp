#include "comm/intranode/plan/call_plan.h"

#include "comm/core/integer_math.h"
#include "comm/transport/mailbox.h"

namespace rz::intranode {

namespace {

constexpr std::size_t KiB = 1024;
// Chunks of a shard, within the limits of min_chunk and max_chunk bytes. Fewer in two_shot, where reducing
// and gathering overlap anyway, and on an oversubscribed node, where each chunk costs a context switch. Large
// chunks were measured to be faster, probably because the lines that a peer reads have left the writer's own
// cache by then.
constexpr std::size_t pipelined = 4, pipelined_two_shot = 2, pipelined_oversubscribed = 2;
constexpr std::size_t min_chunk = 4 * KiB, max_chunk = 128 * KiB, max_chunk_oversubscribed = 64 * KiB;
// Bytes of the staging ring that chunk sizes assume, and that large symmetric calls use.
constexpr std::size_t max_staging_window = 768 * KiB, max_staging_window_oversubscribed = 256 * KiB;
constexpr std::size_t min_staging_window = 16 * KiB;
// Bytes of calls that use a window in the second-level cache; smaller ones use one in the first.
constexpr std::size_t min_second_level_exchange = 2 * KiB, max_second_level_exchange = 4 * KiB;

/// Chunks of a contribution; 1 in a group of one rank, too.
std::size_t shares_of(const CallPlan& plan, int size) {
  return plan.per_peer && size > 1 ? static_cast<std::size_t>(size) - 1 : 1;
}

/// Chunk size by the number of chunks that a shard should have.
std::size_t default_chunk(const CallPlan& plan, std::size_t shares, std::size_t in_flight,
                          bool oversubscribed) {
  const std::size_t wanted =
      (oversubscribed ? max_chunk_oversubscribed : max_chunk) / shares / cache_line_bytes * cache_line_bytes;
  const std::size_t max_bytes = std::min(wanted, in_flight);
  const std::size_t chunks = oversubscribed                        ? pipelined_oversubscribed
                             : plan.protocol == Protocol::two_shot ? pipelined_two_shot
                                                                   : pipelined;
  return std::clamp(round_up(plan.shard_bytes / chunks, cache_line_bytes), std::min(min_chunk, max_bytes),
                    max_bytes);
}

}  // namespace

std::size_t shard_bytes(std::size_t bytes, int size) {
  return round_up(ceil_div(bytes, static_cast<std::size_t>(size)), cache_line_bytes);
}

StagingLimits staging_limits(std::size_t ring_bytes, bool oversubscribed) {
  return {std::min(ring_bytes, oversubscribed ? max_staging_window_oversubscribed : max_staging_window),
          oversubscribed};
}

CallPlan plan_call(Collective kind, std::size_t bytes_per_rank, int size,
                   const tuning::IntranodeAlgorithm& entry, const StagingLimits& limits) {
  CallPlan plan;
  const bool two_shot = kind == Collective::all_reduce && entry.two_shot && bytes_per_rank > 0;
  plan.protocol = two_shot ? Protocol::two_shot : Protocol::one_shot;
  plan.per_peer = two_shot || traits(kind).sends_per_rank();
  plan.shard_bytes = two_shot ? shard_bytes(bytes_per_rank, size) : bytes_per_rank;
  const std::size_t contribution = plan.shard_bytes * shares_of(plan, size);
  const std::size_t slots = std::max<std::size_t>(ceil_div(contribution, inline_bytes), 1);
  if (slots <= (traits(kind).rooted() ? 1 : max_inline_slots) && !two_shot &&
      kind != Collective::all_to_all_v)
    plan.inline_slots = static_cast<std::uint32_t>(slots);
  if (plan.inline_slots)
    plan.chunking.chunk_bytes = std::max<std::size_t>(plan.shard_bytes, 1);
  else
    plan.chunking = chunk_shard(plan, size, entry.chunk, limits);
  return plan;
}

CallPlan plan_in_place(Protocol protocol, Collective kind, std::size_t bytes_per_rank, int size) {
  const bool by_shards = kind == Collective::all_reduce;
  CallPlan plan{.protocol = protocol,
                .per_peer = by_shards || traits(kind).sends_per_rank(),
                .shard_bytes = by_shards ? shard_bytes(bytes_per_rank, size) : bytes_per_rank};
  plan.chunking.chunk_bytes = protocol == Protocol::zero_copy ? zero_copy_chunk : single_copy_chunk;
  plan.chunking.chunks = std::max<std::size_t>(ceil_div(plan.shard_bytes, plan.chunking.chunk_bytes), 1);
  return plan;
}

Chunking chunk_shard(const CallPlan& plan, int size, std::size_t chunk, const StagingLimits& limits) {
  const std::size_t shares = shares_of(plan, size);
  // In two_shot a rank writes two contributions and two results before it needs an ack, and the end of the
  // ring may be too short for a contribution.
  const std::size_t in_flight = limits.staging_bytes / (3 * shares + 2) / cache_line_bytes * cache_line_bytes;
  Chunking cut;
  cut.chunk_bytes =
      chunk ? std::min(chunk, in_flight) : default_chunk(plan, shares, in_flight, limits.oversubscribed);
  const std::size_t whole = std::max(round_up(plan.shard_bytes, cache_line_bytes), cache_line_bytes);
  cut.chunk_bytes = std::min(cut.chunk_bytes, whole);
  cut.chunks = std::max<std::size_t>(ceil_div(plan.shard_bytes, cut.chunk_bytes), 1);
  return cut;
}

/// Symmetric collectives use the whole ring, so that the lines they write have left the readers' caches
/// (comm/transport/shm_layout.h). Small calls use less. Below 2 KiB it is twice the call's bytes, at
/// least 16 KiB, which stay in the writer's first-level cache. Up to 4 KiB it is a 16th of the ring, an
/// eighth of the second-level cache: its lines have left the reader's first-level cache, which the store
/// would have to invalidate, but not yet the writer's second. A call of more than half the ring uses twice
/// its bytes, too: it was measured to be slower in the whole ring, probably because that displaces the data
/// from L3. Measured: bench/results/host/staging_ring.txt.
///
/// In rooted collectives a sender may run ahead of its readers, by as many chunks as there are slots. On an
/// oversubscribed node the window is limited unless 256 whole calls fit into the ring, since at its end the
/// sender waits until the whole window has been read.
std::size_t staging_window(const CallPlan& plan, Collective kind, int size, const StagingLimits& limits,
                           std::size_t all) {
  const auto [chunk, chunks] = plan.chunking;
  const std::size_t contribution = chunk * shares_of(plan, size);
  const std::size_t own = chunks * (contribution + (plan.protocol == Protocol::two_shot ? chunk : 0));
  if (!traits(kind).rooted()) {
    if (own > max_second_level_exchange && own <= all / 2) return all;
    const std::size_t window = own >= min_second_level_exchange && own <= max_second_level_exchange
                                   ? std::max(2 * own, all / 16)
                                   : 2 * own;
    return std::clamp(window, min_staging_window, limits.staging_bytes);
  }
  if (limits.oversubscribed && own * mailbox_depth > all) return limits.staging_bytes;
  return std::clamp(round_up(contribution, cache_line_bytes) * mailbox_depth, min_staging_window, all);
}

bool may_defer_ack(const CallPlan& plan, Collective kind, int size, std::size_t ring_bytes) {
  if (!traits(kind).root_sends()) return plan.inline_slots > 0 && !traits(kind).rooted();
  return plan.chunking.chunks == 1 &&
         round_up(plan.ring_bytes(size), cache_line_bytes) * mailbox_depth <= ring_bytes;
}

}  // namespace rz::intranode
