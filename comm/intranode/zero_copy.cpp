// Handle exchange, and the zero_copy protocol: peers read inputs, and write all_reduce outputs, in place.

#include <algorithm>
#include <cstring>

#include "comm/core/integer_math.h"
#include "comm/intranode/engine.h"

namespace rz {

/// Publishes this rank's handle, reads all others, and chooses the protocol: zero_copy if all needed buffers
/// are mapped; else single_copy if they are readable by CMA and the policy chooses it; else as planned.
bool IntranodeEngine::exchange_handles() {
  if (channel_.next_step() == first_step_) {
    if (!can_reserve(0)) return false;
    publish_handles(local_buffers());
    handles_.write_to(channel_.payload(rank_, first_step_));
    channel_.send();
    return true;
  }
  if (!all_produced(next_contribution_, first_step_)) return false;
  bool zero_copy = algorithm_->try_zero_copy, single_copy = single_copy_ != SingleCopyPolicy::never;
  for (int r = 0; r < size_; ++r) {
    handles_.receive(r, channel_.payload(r, first_step_));
    zero_copy = zero_copy && is_mapped(r);
    single_copy = single_copy && is_readable(r);
  }
  exchanges_handles_ = last_was_zero_copy_ = false;
  if (zero_copy)
    begin_zero_copy();
  else if (single_copy && (single_copy_ == SingleCopyPolicy::always || chooses_single_copy()))
    begin_in_chunks(Protocol::single_copy, single_copy_chunk);
  record_outcome(zero_copy, single_copy);
  return true;
}

/// Updates the backoff of calls like this one. `zero_copy`: all needed buffers are mapped; `single_copy`:
/// they are readable by CMA.
void IntranodeEngine::record_outcome(bool zero_copy, bool single_copy) {
  ZeroCopyBackoff& backoff = zero_copy_backoff();
  const bool adaptive = single_copy && !zero_copy && single_copy_ == SingleCopyPolicy::adaptive;
  backoff.record(zero_copy || (single_copy && !adaptive), adaptive);
  if (!backoff.tuner().enabled()) sampled_tuner_ = nullptr;
}

/// Bytes of a sender's input.
std::size_t IntranodeEngine::input_bytes() const {
  return plan_.per_peer && op_->kind != Collective::all_reduce ? plan_.shard_bytes * index(size_)
                                                               : total_bytes_;
}

/// The buffers of this call that peers may access. The input of an in-place all_to_all is not among them: it
/// is overwritten while peers would read it, so such calls are staged.
LocalBuffers IntranodeEngine::local_buffers() const {
  const bool swaps = op_->kind == Collective::all_to_all && op_->in.data == op_->out.data;
  const auto at = [](const void* p, std::size_t bytes) {
    return std::span(static_cast<const std::byte*>(p), p ? bytes : 0);
  };
  LocalBuffers own;
  if (!swaps) own.in = at(op_->in.data, input_bytes());
  if (op_->kind == Collective::all_reduce) own.out = at(op_->out.data, total_bytes_);
  return own;
}

void IntranodeEngine::publish_handles(const LocalBuffers& own) {
  const SingleCopyTuner& tuner = zero_copy_backoff().tuner();
  handles_.publish_local(
      own, single_copy_ != SingleCopyPolicy::never,
      tuner.enabled() && tuner.is_decision() ? tuner.own_times() : SingleCopyTuner::Times{});
}

/// True if all buffers of that rank that this call accesses are mapped, by its handle.
bool IntranodeEngine::is_mapped(int r) const {
  return (handles_.is_mapped_in(r) || !is_sender(r)) &&
         (handles_.is_mapped_out(r) || op_->kind != Collective::all_reduce);
}

/// The backoff state of calls of this kind and count, by a hash that is the same on every rank.
ZeroCopyBackoff& IntranodeEngine::zero_copy_backoff() {
  const CallSignature call = channel_.call();
  const std::uint64_t h = (call.count * 16 + static_cast<std::uint64_t>(call.kind)) * 0x9e3779b97f4a7c15u;
  return backoffs_[h >> 58];
}

/// By the backoff of calls like this one; all ranks see the same outcomes and decide alike. Begins a sample
/// of the SingleCopyTuner if this call is one.
bool IntranodeEngine::should_exchange_handles() {
  if (algorithm_->forced) return true;
  ZeroCopyBackoff& backoff = zero_copy_backoff();
  const bool probes = backoff.should_probe();
  if (backoff.tuner().enabled() && backoff.tuner().is_sample()) begin_sample(backoff.tuner());
  return probes;
}

/// Sets the chunks of a call that accesses buffers in place.
void IntranodeEngine::begin_in_chunks(Protocol protocol, std::size_t chunk_bytes) {
  if (op_->kind == Collective::all_reduce)
    chunks_.per_peer = true, chunks_.shard_bytes = shard_bytes(total_bytes_, size_);
  chunks_.protocol = protocol;
  chunks_.chunk_bytes = chunk_bytes;
  chunks_.chunks = std::max<std::size_t>(ceil_div(chunks_.shard_bytes, chunks_.chunk_bytes), 1);
}

void IntranodeEngine::begin_zero_copy() {
  begin_in_chunks(Protocol::zero_copy, zero_copy_chunk);
  for (int r = 0; r < size_; ++r)
    if (r != rank_) map_peer(r);
  zero_copy_chunks_ = chunks_;
  last_was_zero_copy_ = chunks_.chunks == 1;
}

/// Maps the buffers of that peer that this call accesses.
void IntranodeEngine::map_peer(int peer) {
  if (reads_from(peer)) handles_.map_in(peer, input_bytes());
  if (op_->kind == Collective::all_reduce) handles_.map_out(peer, total_bytes_);
}

bool IntranodeEngine::advance_zero_copy() {
  if (read_ < chunks_.chunks) {
    read_zero_copy(read_++);
    if (read_ == chunks_.chunks) channel_.send();  // this rank no longer accesses any peer's buffers
    return true;
  }
  if (!all_produced(next_result_, data_step_)) return false;
  finish();
  return true;
}

void IntranodeEngine::read_zero_copy(std::size_t round) {
  const std::size_t at = round * chunks_.chunk_bytes;
  auto* const out = static_cast<std::byte*>(op_->out.data);
  const auto source = [&](int r) {
    const auto* base = r == rank_ ? static_cast<const std::byte*>(op_->in.data) : handles_.in(r);
    return base + (chunks_.per_peer ? index(rank_) * chunks_.shard_bytes : 0) + at;
  };
  if (op_->kind == Collective::broadcast || op_->kind == Collective::scatter)
    return copy_to_output(out + at, rank_ == op_->root ? shard_for(rank_) + at : source(op_->root),
                          chunk_length(chunks_.shard_bytes, round));
  if ((op_->kind == Collective::gather || op_->kind == Collective::reduce) && rank_ != op_->root) return;
  if (!traits(op_->kind).reduces) {
    for (int r = 0; r < size_; ++r)
      copy_to_output(out + index(r) * chunks_.shard_bytes + at, source(r),
                     chunk_length(chunks_.shard_bytes, round));
    return;
  }
  for (int r = 0; r < size_; ++r) sources_[index(r)] = source(r);
  if (op_->kind != Collective::all_reduce)
    return reduce_to_output(out + at, nullptr, chunk_length(chunks_.shard_bytes, round));
  const std::size_t own = index(rank_) * chunks_.shard_bytes + at;
  reduce_to_all(out + own, own, chunk_length(shard_bytes_of(rank_), round));
}

/// Reduces sources_ into this rank's output at `to`, and into all peers' outputs at offset `at`.
void IntranodeEngine::reduce_to_all(std::byte* to, std::size_t at, std::size_t bytes) {
  const int other = rank_ == 0 ? 1 : 0;
  if (size_ == 2 && !nontemporal_) return reduce_block(to, handles_.out(other) + at, bytes);
  std::byte buffer[block_bytes];
  for (std::size_t i = 0; i < bytes; i += block_bytes) {
    const std::size_t n = std::min(block_bytes, bytes - i);
    std::byte* const near = nontemporal_ ? buffer : to + i;
    reduce_block(near, nullptr, n);
    copy_to_output(to + i, near, n);
    for (int r = 0; r < size_; ++r)
      if (r != rank_) copy_to_output(handles_.out(r) + at + i, near, n);
    for (auto& s : sources_) s = static_cast<const std::byte*>(s) + n;
  }
}

}  // namespace rz
