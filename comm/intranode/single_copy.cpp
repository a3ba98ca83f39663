// The single_copy protocol: the kernel copies private memory of peers into this rank's output
// (comm/os/cma.h).

#include "comm/intranode/engine.h"

namespace rz {

/// True if the needed input of rank r is readable and rank r can read the others' inputs.
bool IntranodeEngine::is_readable(int r) const {
  return handles_.has_cma(r) && (handles_.is_cma_readable_in(r) || !is_sender(r));
}

void IntranodeEngine::begin_sample(SingleCopyTuner& tuner) {
  sampled_tuner_ = &tuner;
  sample_begin_ = std::chrono::steady_clock::now();
}

void IntranodeEngine::end_sample() {
  sampled_tuner_->record(std::chrono::steady_clock::now() - sample_begin_);
  sampled_tuner_ = nullptr;
}

/// The tuner's choice for this call; the same on all ranks, since they have the same handles and times.
bool IntranodeEngine::chooses_single_copy() {
  SingleCopyTuner& tuner = zero_copy_backoff().tuner();
  if (!tuner.enabled()) return false;
  if (tuner.is_decision()) {
    std::uint64_t single_copy_ns, staged_ns;
    handles_.sum_times(single_copy_ns, staged_ns);
    tuner.decide(single_copy_ns, staged_ns);
  }
  return tuner.uses_single_copy();
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

/// Publishes that this rank has read all it needs, and whether the kernel refused. No try_reserve() is needed
/// for this payload: all ranks have entered this call, so no peer reads the slot's previous contents.
void IntranodeEngine::send_end_of_reads() {
  *channel_.payload(rank_, data_step_) = std::byte{cma_refused_};
  channel_.send();
}

bool IntranodeEngine::all_have_read() const {
  for (int r = 0; r < size_; ++r)
    if (*channel_.payload(r, data_step_) != std::byte{}) return false;
  return true;
}

/// Restarts the call as planned, staged, on all ranks. Data movement has not changed any input, so nothing is
/// lost. From the next call on the refused rank publishes has_cma = false.
void IntranodeEngine::fall_back_to_staged() {
  channel_.ack(channel_.next_step());
  chunks_ = plan_;
  data_step_ = channel_.next_step();
  contributed_ = reduced_ = read_ = 0;
  next_contribution_ = next_result_ = 0;
  cma_refused_ = false;
  sampled_tuner_ = nullptr;  // its time is meaningless
}

CmaResult IntranodeEngine::read_single_copy(std::size_t round) {
  const std::size_t at = round * chunks_.chunk_bytes, n = chunk_length(chunks_.shard_bytes, round);
  auto* const out = static_cast<std::byte*>(op_->out.data);
  if (traits(op_->kind).root_sends()) return fetch(op_->root, at, out + at, n);
  if (traits(op_->kind).rooted() && rank_ != op_->root) return CmaResult::done;
  for (int i = 1; i <= size_; ++i) {
    const int r = (rank_ + i) % size_;  // its own shard last
    const CmaResult read = fetch(r, at, out + index(r) * chunks_.shard_bytes + at, n);
    if (read != CmaResult::done) return read;
  }
  return CmaResult::done;
}

/// Copies `bytes` of rank r's data for this rank, from offset `at` on, mapped or by CMA.
CmaResult IntranodeEngine::fetch(int r, std::size_t at, std::byte* to, std::size_t bytes) {
  if (bytes == 0) return CmaResult::done;
  if (r == rank_) return copy_to_output(to, shard_for(rank_) + at, bytes), CmaResult::done;
  if (chunks_.per_peer) at += index(rank_) * chunks_.shard_bytes;
  const std::byte* const mapped = handles_.mapped_in(r, at, bytes);
  return mapped ? copy_to_output(to, mapped, bytes), CmaResult::done : handles_.cma_read(r, at, {to, bytes});
}

}  // namespace rz
