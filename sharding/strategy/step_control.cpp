#include "sharding/strategy/step_control.h"

#include <array>
#include <cmath>
#include <cstring>

#include "comm/core/error.h"
#include "comm/device/allocate.h"
#include "comm/device/memory.h"
#include "comm/device/meta.h"
#include "sharding/optim/grad_norm.h"
#include "sharding/parallel/rank_consistency.h"
#include "tensor/kernels/device_ops.h"

namespace rz {

StepControl::StepControl(const ShardedModel& model, Runtime& runtime) : model_(model), runtime_(runtime) {}

// ---- the loss

/// Sums in pairwise order are not divided by the number of ranks.
float StepControl::loss_gradient() const {
  const bool sums = model_.options().pairwise_passes > 0;
  return settings_.loss_gradient(sums ? 1 : runtime_.communicator.size());
}

Tensor StepControl::device_loss_gradient(const Stream& stream) {
  write_settings(stream);
  return device_limits_.loss_gradient();
}

// ---- an update

/// Adds each element exactly once over all ranks.
void StepControl::add_squares(SquareSum& sum) const {
  const FlatLayout& layout = model_.layout();
  for (int b = 0; b < layout.size(); ++b) {
    const Range own = layout.shard(b);
    sum.add(model_.gradients().mean(b).view(own.begin - layout.updated(b).begin, {own.count()}));
  }
}

bool StepControl::all_reduce(std::span<ExactSum> sums, std::optional<std::uint64_t> hash) {
  const int ranks = runtime_.communicator.size();
  std::array<std::int64_t, 2> compared = ComparedWords::of(hash.value_or(0), ranks);
  const std::span more(compared.data(), hash ? compared.size() : 0);
  if (ranks == 1 || (sums.empty() && more.empty())) return true;
  runtime_.exposed.measure([&] { ExactSum::all_reduce(sums, exact_words_, runtime_.communicator, more); });
  runtime_.traffic.control.add(exact_words_.size() * sizeof(exact_words_[0]));
  return is_meta() || ComparedWords::equal(compared, ranks);
}

/// Its losses have no data, and its communicator sums nothing.
bool StepControl::is_meta() const { return rz::is_meta(runtime_.communicator.options().device); }

StepOutcome StepControl::outcome_of(std::span<ExactSum, 2> sums, const StepLimits& limits) const {
  const bool counted = is_counted() && !is_meta();
  return step_outcome(sums[0].value(), counted ? sums[1].value() : uncounted_terms, limits);
}

double StepControl::norm(const Stream& stream) {
  SquareSum sum(stream, norm_words_);
  add_squares(sum);
  std::array sums{sum.read(), terms_.read(stream)};
  all_reduce({sums.data(), summed()}, {});
  return outcome_of(sums, settings_.limits()).norm;
}

double StepControl::clip(double max_norm, const Stream& stream) {
  const double before = norm(stream);
  clip_factor_ = clip_factor(before, max_norm);
  return before;
}

StepControl::Decision StepControl::scale(std::uint64_t hash, const Stream& stream) {
  ExactSum terms = terms_.read(stream);
  std::optional<std::uint64_t> compared;  // on a device hashes were compared before
  if (stream.device().kind == Device::host) compared = hash;
  const bool equal = all_reduce({&terms, is_counted() ? std::size_t{1} : 0}, compared);
  const StepLimits limits = settings_.limits();
  const double factor = clip_factor_ * term_factor(terms.value(), limits) / limits.loss_scale;
  return {.differs = !equal, .scale = {.factor = static_cast<float>(factor)}};
}

StepControl::Decision StepControl::decide(std::uint64_t hash, const Stream& stream) {
  if (stream.device().kind != Device::host) return decide_on_device(stream);
  SquareSum sum(stream, norm_words_);
  add_squares(sum);
  std::array sums{sum.read(), terms_.read(stream)};
  if (settings_.limits().skip_overflow && !terms_.finite()) sums[0].add(std::nan(""));
  const bool equal = all_reduce({sums.data(), summed()}, hash);
  outcome_ = outcome_of(sums, settings_.limits());
  return {.differs = !equal, .skip = outcome_.skip != 0, .scale = {.factor = outcome_.grad_scale}};
}

StepControl::Decision StepControl::decide_on_device(const Stream& stream) {
  constexpr std::size_t words = ExactLayout::words;
  write_settings(stream);
  if (!sums_.defined()) {
    sums_ = Tensor::empty({2 * words}, DType::i64, allocator_on(stream.device()));
    device_outcome_ = Tensor::empty({sizeof(StepOutcome)}, DType::u8, allocator_on(stream.device()));
  }
  Tensor squares = sums_.view(0, {words});
  SquareSum sum(stream, squares);
  add_squares(sum);
  sum.words();  // zeros if there are no gradients
  if (settings_.limits().skip_overflow) terms_.add_not_finite(sum);
  const Tensor terms = is_counted() ? sums_.view(words, {words}) : Tensor();
  if (terms.defined()) terms_.copy_to(terms, stream);
  const Tensor used = terms.defined() ? sums_ : squares;
  runtime_.traffic.control.add(used.bytes());
  runtime_.exposed.wait(runtime_.communicator.all_reduce(used.buffer(), ReduceOp::sum, stream), stream);
  auto* const decided = reinterpret_cast<StepOutcome*>(device_outcome_.raw());
  ops::device_ops().optimizer.decide_step(decided, squares.data<std::int64_t>(),
                                          terms.defined() ? terms.data<std::int64_t>() : nullptr,
                                          device_limits_.limits(), stream);
  return {.scale = {.device_outcome = decided}};
}

StepOutcome StepControl::outcome(const Stream& stream) {
  if (stream.device().kind == Device::host) return outcome_;
  require(device_outcome_.defined(), Errc::invalid_argument, "outcome() before the first clip_and_step()");
  runtime_.communicator.synchronize(stream);
  const Tensor bytes = device_outcome_.on_host(stream);
  StepOutcome made;
  std::memcpy(&made, bytes.raw(), sizeof made);
  return made;
}

}  // namespace rz
