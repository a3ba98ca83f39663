// Calls that move what lies in other processes: the kernel copies it once (comm/os/cma.h).

#include "comm/intranode/engine.h"

namespace rz {

/// Whether what is needed of that rank can be read, and it reads what it needs.
bool IntranodeEngine::is_readable(int r) const {
  return handles_.has_cma(r) && (handles_.is_cma_readable_in(r) || !is_sender(r));
}

void IntranodeEngine::begin_sample(SingleCopyTuner& by_time) {
  sampled_tuner_ = &by_time;
  sample_begin_ = std::chrono::steady_clock::now();
}

void IntranodeEngine::end_sample() {
  sampled_tuner_->record(std::chrono::steady_clock::now() - sample_begin_);
  sampled_tuner_ = nullptr;
}

/// All have heard the same.
bool IntranodeEngine::chooses_single_copy() {
  SingleCopyTuner& by_time = zero_copy_backoff().tuner();
  if (!by_time.enabled()) return false;
  if (by_time.is_decision()) {
    std::uint64_t single_copy_ns, staged_ns;
    handles_.sum_times(single_copy_ns, staged_ns);
    by_time.decide(single_copy_ns, staged_ns);
  }
  return by_time.uses_single_copy();
}

bool IntranodeEngine::advance_single_copy() {
  if (read_ < chunks_.chunks) {
    const CmaResult read = read_single_copy(read_);
    if (read == CmaResult::gone) return false;
    cma_refused_ = read == CmaResult::refused;
    read_ = cma_refused_ ? chunks_.chunks : read_ + 1;
    if (read_ == chunks_.chunks) send_end_of_reads();
    return true;
  }
  if (!all_produced(next_result_, data_step_)) return false;
  all_have_read() ? finish() : fall_back_to_staged();
  return true;
}

/// This rank reads no peer's memory any more; its letter says whether it was refused. All have come to this
/// call, so nobody needs what lay there.
void IntranodeEngine::send_end_of_reads() {
  *channel_.payload(rank_, data_step_) = std::byte{cma_refused_};
  channel_.send();
}

bool IntranodeEngine::all_have_read() const {
  for (int r = 0; r < size_; ++r)
    if (*channel_.payload(r, data_step_) != std::byte{}) return false;
  return true;
}

/// Begins the call anew, through letters and rings, on all ranks: calls that only move have not changed what
/// is yet to be moved. From the next call on who was refused says so before (BufferHandle::has_cma).
void IntranodeEngine::fall_back_to_staged() {
  channel_.ack(channel_.next_step());
  chunks_ = plan_;
  data_step_ = channel_.next_step();
  contributed_ = reduced_ = read_ = 0;
  next_contribution_ = next_result_ = 0;
  cma_refused_ = false;
  sampled_tuner_ = nullptr;  // its time tells nothing
}

CmaResult IntranodeEngine::read_single_copy(std::size_t round) {
  const std::size_t at = round * chunks_.chunk_bytes, n = chunk_length(chunks_.shard_bytes, round);
  auto* const out = static_cast<std::byte*>(op_->out.data);
  if (traits(op_->kind).root_sends()) return fetch(op_->root, at, out + at, n);
  if (traits(op_->kind).rooted() && rank_ != op_->root) return CmaResult::done;
  for (int i = 1; i <= size_; ++i) {
    const int r = (rank_ + i) % size_;  // one's own last
    const CmaResult read = fetch(r, at, out + index(r) * chunks_.shard_bytes + at, n);
    if (read != CmaResult::done) return read;
  }
  return CmaResult::done;
}

/// What rank r has for this one, from `at` on.
CmaResult IntranodeEngine::fetch(int r, std::size_t at, std::byte* to, std::size_t bytes) {
  if (bytes == 0) return CmaResult::done;
  if (r == rank_) return copy_to_output(to, shard_for(rank_) + at, bytes), CmaResult::done;
  if (chunks_.per_peer) at += index(rank_) * chunks_.shard_bytes;
  const std::byte* const mapped = handles_.mapped_in(r, at, bytes);
  return mapped ? copy_to_output(to, mapped, bytes), CmaResult::done : handles_.cma_read(r, at, {to, bytes});
}

}  // namespace rz
