#include "comm/intranode/engine.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>

#include "comm/core/deadline.h"
#include "comm/core/error.h"
#include "comm/core/integer_math.h"
#include "comm/schedule/chunk_layout.h"

namespace rz {

namespace {

constexpr std::size_t min_nontemporal_bytes = 96 << 20;  // of all ranks' buffers: exceeds the caches
constexpr std::size_t min_staging_window = 16 << 10;
constexpr std::size_t max_cached_exchange = 4 << 10;  // bytes of a call that uses a small, cached window
constexpr auto max_yield_time = std::chrono::microseconds(500);
constexpr int spins_before_yield = 16;  // about 4 us; then other threads may use this processor

}  // namespace

IntranodeEngine::IntranodeEngine(Transport& transport, int rank, int size, std::uint32_t first_step)
    : IntranodeEngine(transport, rank, size, IntranodeTuningTable(size), first_step) {}

IntranodeEngine::IntranodeEngine(Transport& transport, int rank, int size, IntranodeTuningTable table,
                                 std::uint32_t first_step)
    : channel_(*transport.shared_memory(), rank, size, first_step),
      rank_(rank),
      size_(size),
      oversubscribed_(transport.oversubscribed()),
      collected_slots_(std::make_unique<std::byte[]>(index(size) * max_inline_slots * inline_bytes)),
      sources_(index(size)),
      handles_(*transport.shared_memory(), rank, size),
      table_(std::move(table)) {}

// ---- a call

void IntranodeEngine::start(const CollectiveCall& op, std::uint32_t sequence) {
  if (!traits(op.kind).root_sends()) channel_.flush_acks();
  op_ = &op;
  const CallShape shape = shape_of(op);
  if (shape == planned_shape_) {
    channel_.begin_repeat(sequence);
  } else {
    channel_.begin(make_signature(op, size_, sequence));
    plan();
    planned_shape_ = shape;
  }
  reset(channel_.next_step());
}

/// Resets the state to the beginning of a call with the current plan, at that step.
void IntranodeEngine::reset(std::uint32_t first) {
  chunks_ = plan_;
  complete_ = false;
  contributed_ = reduced_ = read_ = 0;
  next_contribution_ = next_result_ = 0;
  first_step_ = first;
  sampled_tuner_ = nullptr;
  exchanges_handles_ = may_exchange_handles_ && should_exchange_handles();
  exchanges_counts_ = op_->kind == Collective::all_to_all_v;
  if (exchanges_counts_) set_staging_window();
  data_step_ = first_step_ + (exchanges_handles_ || exchanges_counts_);
}

IntranodeEngine::CallShape IntranodeEngine::shape_of(const CollectiveCall& op) {
  const bool in_place = op.in.data == op.out.data;
  const DType dtype = op.out.data ? op.out.dtype : op.in.dtype;
  return {op.in.count, op.out.count,
          static_cast<std::uint64_t>(op.kind) | static_cast<std::uint64_t>(dtype) << 8 |
              static_cast<std::uint64_t>(op.op.kind) << 16 | static_cast<std::uint64_t>(in_place) << 24 |
              static_cast<std::uint64_t>(static_cast<std::uint32_t>(op.root)) << 32};
}

const IntranodeAlgorithm* IntranodeEngine::find_schedule(const CollectiveCall& op) const {
  const DType dtype = op.out.data ? op.out.dtype : op.in.dtype;
  const std::size_t bytes = count_per_rank(op, size_) * size_of(dtype);
  const IntranodeAlgorithm& entry = table_.find(op.kind, message_bytes(op.kind, bytes, size_));
  return entry.schedule ? &entry : nullptr;
}

/// Makes the plan of the current call: protocol, chunks, senders.
void IntranodeEngine::plan() {
  element_bytes_ = op_->kind == Collective::barrier ? 1 : size_of(channel_.call().dtype);
  total_bytes_ = op_->kind == Collective::barrier ? 0 : channel_.call().count * element_bytes_;
  const IntranodeAlgorithm& entry = table_.find(op_->kind, message_bytes(op_->kind, total_bytes_, size_));
  const CallPlan plan = plan_call(op_->kind, total_bytes_, size_, entry, limits());
  chunks_ = plan_ = {plan.two_shot ? Protocol::two_shot : Protocol::one_shot, plan.per_peer, plan.shard_bytes,
                     plan.chunking.chunk_bytes, plan.chunking.chunks};
  inline_ = plan.inline_slots > 0;
  slots_ = std::max(plan.inline_slots, 1u);
  algorithm_ = &entry;
  choose_peers();
  if (!inline_) set_staging_window();
  const std::size_t n = index(size_),
                    whole = chunks_.per_peer ? chunks_.shard_bytes * n : chunks_.shard_bytes;
  const bool read_before = traits(op_->kind).reduces && op_->in.data == op_->out.data;  // output is cached
  nontemporal_ = !read_before && 2 * n * whole >= min_nontemporal_bytes;
  single_copy_ = oversubscribed_ && entry.single_copy == SingleCopyPolicy::adaptive ? SingleCopyPolicy::never
                                                                                    : entry.single_copy;
  may_exchange_handles_ = entry.try_zero_copy || single_copy_ != SingleCopyPolicy::never;
  if (traits(op_->kind).reduces) reduce_kernel_ = reduce_kernel(channel_.call().dtype, op_->op.kind);
  key_ = key_of_plan();
  if (key_ != ~0ull) last_call_ = *op_;
  last_was_zero_copy_ = false;
  fast_path_ = !may_exchange_handles_ && plan_.protocol == Protocol::one_shot && plan_.chunks == 1;
}

/// ~0, no fast path, for calls that need a copy of their input or are longer than max_inline_bytes.
std::uint64_t IntranodeEngine::key_of_plan() const {
  const CallSignature call = channel_.call();
  const bool plain = call.op != ReduceOp::premul_sum && call.kind != Collective::all_to_all_v;
  if (!plain || message_bytes(call.kind, total_bytes_, size_) > max_inline_bytes) return ~0ull;
  return call_key(call.kind, call.dtype, call.op, call.root);
}

bool IntranodeEngine::is_sender(int rank) const { return traits(op_->kind).sends(rank == op_->root); }

void IntranodeEngine::choose_peers() {
  is_sender_ = is_sender(rank_);
  first_sender_ = 0, last_sender_ = size_;
  if (!traits(op_->kind).rooted()) return;
  const bool at_root = rank_ == op_->root;
  if (traits(op_->kind).root_sends())
    first_sender_ = op_->root, last_sender_ = op_->root + !at_root;
  else if (!at_root)
    last_sender_ = 0;
}

/// Sets the part of the staging ring that this call uses.
///
/// Symmetric collectives use the whole ring, so that the lines they write have left the readers' caches
/// (comm/shared_memory/staging_ring.h). Two exceptions use twice the call's bytes, within limits: a call of
/// up to 4 KiB, whose window stays in the writer's cache; and a call of more than half the ring, which was
/// measured to be slower in the whole ring, probably because the ring then displaces the data from L3.
///
/// In rooted collectives a sender may run ahead of its readers, by as many chunks as there are slots. On an
/// oversubscribed node the window is limited unless 256 whole calls fit into the ring, since at its end the
/// sender waits until the whole window has been read.
void IntranodeEngine::set_staging_window() {
  const std::size_t shares = chunks_.per_peer ? index(size_) - 1 : 1, all = channel_.staging_bytes();
  const std::size_t own =
      chunks_.chunks *
      (chunks_.chunk_bytes * shares + (chunks_.protocol == Protocol::two_shot ? chunks_.chunk_bytes : 0));
  const std::size_t in_turns = limits().staging_bytes;
  if (!traits(op_->kind).rooted()) {
    const bool turns_in_all = own > max_cached_exchange && own <= all / 2;
    return channel_.set_staging_window(turns_in_all ? all
                                                    : std::clamp(2 * own, min_staging_window, in_turns));
  }
  if (oversubscribed_ && own * mailbox_depth > all) return channel_.set_staging_window(in_turns);
  const std::size_t bytes = round_up(chunks_.chunk_bytes * shares, cache_line_bytes);
  channel_.set_staging_window(std::clamp(bytes * mailbox_depth, min_staging_window, all));
}

bool IntranodeEngine::advance() {
  if (complete_) return false;
  if (exchanges_handles_ || exchanges_counts_)
    return exchanges_counts_ ? exchange_counts() : exchange_handles();
  switch (chunks_.protocol) {
    case Protocol::one_shot:
      return advance_one_shot();
    case Protocol::two_shot:
      return advance_two_shot();
    case Protocol::zero_copy:
      return advance_zero_copy();
    case Protocol::single_copy:
      return advance_single_copy();
  }
  return false;
}

bool IntranodeEngine::spin(int turns) {
  std::optional<Deadline> end;  // yields are limited: a computing rank keeps its processor for milliseconds
  std::size_t moved = 0;        // bytes
  busy_ = false;
  for (int i = 0; i < turns; ++i) {
    while (!complete_ && !busy_ && advance()) busy_ = (moved += chunks_.chunk_bytes) >= max_spin_bytes;
    if (complete_) return busy_ = false, true;
    if (busy_) return false;
    if (!oversubscribed_) {
      channel_.spin_once();
      if (i % spins_before_yield == spins_before_yield - 1) sched_yield();
      continue;
    }
    channel_.flush_acks();
    sched_yield();
    if (i % 16 != 15) continue;  // most calls end before the first clock read
    if (!end) end = Deadline::after(max_yield_time);
    if (end->expired()) break;
  }
  channel_.check_peer_alive();
  return false;
}

// ---- all_to_all_v: the ranks exchange their counts, which determine the number of rounds

bool IntranodeEngine::exchange_counts() {
  const std::size_t n = index(size_);
  if (channel_.next_step() == first_step_) {
    const std::size_t bytes = n * sizeof(std::size_t);
    if (!can_reserve(bytes)) return false;
    std::memcpy(channel_.bytes(rank_, first_step_), op_->counts->send_counts.data(), bytes);
    channel_.send();
    return true;
  }
  if (!all_arrived(next_contribution_, first_step_)) return false;
  std::size_t max_count = 0;
  for (int r = 0; r < size_; ++r) {
    const auto* row = r == rank_ ? op_->counts->send_counts.data()
                                 : reinterpret_cast<const std::size_t*>(channel_.bytes(r, first_step_));
    max_count = std::max(max_count, *std::max_element(row, row + size_));
    CallSignature theirs = channel_.call(), mine = theirs;
    theirs.count = row[rank_], mine.count = op_->counts->recv_counts[index(r)];
    require(theirs == mine, Errc::mismatch, "mismatched collectives: rank ", r, " called ", describe(theirs),
            " while rank ", rank_, " called ", describe(mine),
            "; every rank must make the same calls in the same order");
  }
  channel_.ack(first_step_ + 1);
  exchanges_counts_ = false;
  chunks_.shard_bytes = max_count * element_bytes_;
  const Chunking chunking = chunk_shard({.per_peer = chunks_.per_peer, .shard_bytes = chunks_.shard_bytes},
                                        size_, algorithm_->chunk, limits());
  chunks_.chunk_bytes = chunking.chunk_bytes, chunks_.chunks = chunking.chunks;
  set_staging_window();
  return true;
}

// ---- missing peers

bool IntranodeEngine::waits_for(int peer) const {
  return exchanges_handles_ || chunks_.protocol >= Protocol::zero_copy || reads_from(peer);
}
WaitState IntranodeEngine::waiting_on() const {
  if (complete_) return {.text = "nobody"};
  return channel_.waiting_on([this](int r) { return waits_for(r); });
}

}  // namespace rz
