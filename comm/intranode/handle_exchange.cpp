#include "comm/intranode/handle_exchange.h"

namespace rz::intranode {

namespace {

/// The buffers of a call that peers may access. The input of an in-place all_to_all is not among them: it is
/// overwritten while peers would read it, so such calls are staged.
LocalBuffers local_buffers(const PlannedCall& c) {
  const bool swaps = c.ranks().kind == Collective::all_to_all && c.op->in.data == c.op->out.data;
  const auto at = [](const std::byte* p, std::size_t bytes) { return std::span(p, p ? bytes : 0); };
  LocalBuffers own;
  if (!swaps) own.in = at(c.in(), c.layout.input_bytes());
  if (c.ranks().kind == Collective::all_reduce) own.out = at(c.out(), c.layout.total_bytes);
  return own;
}

}  // namespace

bool HandleExchange::begin(const PlannedCall& c) {
  next_ = 0, complete_ = false, sampled_ = nullptr;
  if (c.algorithm->forced) return true;
  ZeroCopyBackoff& backoff = backoff_of(c);
  const bool probes = backoff.should_probe();
  if (backoff.tuner().enabled() && backoff.tuner().is_sample())
    sampled_ = &backoff.tuner(), sample_begin_ = std::chrono::steady_clock::now();
  return probes;
}

bool HandleExchange::advance(const PlannedCall& c, StepNumber step) {
  if (channel_.next_step() == step) {
    if (!channel_.try_reserve(handle_reservation)) return false;
    publish(c, local_buffers(c));
    handles_.write_to(channel_.payload(rank_, step));
    channel_.send();
    return true;
  }
  if (!poll_all(step)) return false;
  for (int r = 0; r < size_; ++r) handles_.receive(r, channel_.payload(r, step));
  return complete_ = true;
}

Protocol HandleExchange::choose(const PlannedCall& c) {
  bool mapped = c.algorithm->try_zero_copy, readable = c.single_copy != tuning::SingleCopyPolicy::never;
  for (int r = 0; r < size_; ++r)
    mapped = mapped && is_mapped(c, r), readable = readable && is_readable(c, r);
  const bool adaptive = readable && !mapped && c.single_copy == tuning::SingleCopyPolicy::adaptive;
  ZeroCopyBackoff& backoff = backoff_of(c);
  Protocol protocol = c.plan.protocol;
  if (mapped)
    protocol = Protocol::zero_copy;
  else if (readable && (!adaptive || tuner_chooses_single_copy(backoff)))
    protocol = Protocol::single_copy;
  backoff.record(mapped || (readable && !adaptive), adaptive);
  if (!backoff.tuner().enabled()) sampled_ = nullptr;
  return protocol;
}

void HandleExchange::publish_again(const PlannedCall& c, StepNumber step) {
  if (const LocalBuffers own = local_buffers(c); !handles_.is_unchanged(own)) publish(c, own);
  handles_.write_to(channel_.payload(rank_, step));
  channel_.send();
}

void HandleExchange::publish(const PlannedCall& c, const LocalBuffers& own) {
  const SingleCopyTuner& tuner = backoff_of(c).tuner();
  handles_.publish_local(
      own, c.single_copy != tuning::SingleCopyPolicy::never,
      tuner.enabled() && tuner.is_decision() ? tuner.own_times() : SingleCopyTuner::Times{});
}

/// True if all buffers of rank r that this call accesses are mapped, by its handle.
bool HandleExchange::is_mapped(const PlannedCall& c, int r) const {
  return (handles_.is_mapped_in(r) || !c.ranks().sends(r)) &&
         (handles_.is_mapped_out(r) || c.ranks().kind != Collective::all_reduce);
}

/// True if the needed input of rank r is readable and rank r can read the others' inputs.
bool HandleExchange::is_readable(const PlannedCall& c, int r) const {
  return handles_.has_cma(r) && (handles_.is_cma_readable_in(r) || !c.ranks().sends(r));
}

bool HandleExchange::tuner_chooses_single_copy(ZeroCopyBackoff& backoff) {
  SingleCopyTuner& tuner = backoff.tuner();
  if (!tuner.enabled()) return false;
  if (tuner.is_decision()) {
    std::uint64_t single_copy_ns, staged_ns;
    handles_.sum_times(single_copy_ns, staged_ns);
    tuner.decide(single_copy_ns, staged_ns);
  }
  return tuner.uses_single_copy();
}

/// The backoff state of calls of this kind and count, by a hash that is the same on every rank.
ZeroCopyBackoff& HandleExchange::backoff_of(const PlannedCall& c) {
  const std::uint64_t count = c.layout.total_bytes / c.layout.element_bytes;
  const std::uint64_t h = (count * 16 + static_cast<std::uint64_t>(c.ranks().kind)) * 0x9e3779b97f4a7c15u;
  return backoffs_[h >> 58];
}

void HandleExchange::end_sample() {
  sampled_->record(std::chrono::steady_clock::now() - sample_begin_);
  sampled_ = nullptr;
}

}  // namespace rz::intranode
