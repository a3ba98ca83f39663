#include "sharding/update/control/step_control.h"

#include <array>
#include <cstring>

#include "comm/core/error.h"
#include "comm/device/allocate.h"
#include "comm/device/memory.h"
#include "sharding/optim/grad_norm.h"
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

/// One call of the communicator for squares and terms.
StepOutcome StepControl::outcome_of(const SquareSum& sum, const StepLimits& limits, const Stream& stream) {
  std::array sums{sum.read(), terms_.read(stream)};
  const std::size_t used = is_counted() ? 2 : 1;
  runtime_.exposed.measure([&] {
    ExactSum::all_reduce({sums.data(), used}, exact_words_, runtime_.communicator);
  });
  runtime_.traffic.control.add(exact_words_.size() * sizeof(exact_words_[0]));
  return step_outcome(sums[0].value(), sums[1].value(), limits);
}

double StepControl::norm(const Stream& stream) {
  SquareSum sum(stream, norm_words_);
  add_squares(sum);
  return outcome_of(sum, settings_.limits(), stream).norm;
}

double StepControl::clip(double max_norm, const Stream& stream) {
  const double before = norm(stream);
  clip_factor_ = clip_factor(before, max_norm);
  return before;
}

UpdateScale StepControl::scale(const Stream& stream) {
  ExactSum terms = terms_.read(stream);
  if (is_counted()) {
    runtime_.exposed.measure([&] { terms.all_reduce(runtime_.communicator); });
    runtime_.traffic.control.add(ExactLayout::words * sizeof(std::int64_t));
  }
  const StepLimits limits = settings_.limits();
  return {.factor =
              static_cast<float>(clip_factor_ * term_factor(terms.value(), limits) / limits.loss_scale)};
}

StepControl::Decision StepControl::decide(const Stream& stream) {
  if (stream.device().kind != Device::host) return decide_on_device(stream);
  SquareSum sum(stream, norm_words_);
  add_squares(sum);
  outcome_ = outcome_of(sum, settings_.limits(), stream);
  return {outcome_.skip != 0, {.factor = outcome_.grad_scale}};
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
  const Tensor terms = is_counted() ? sums_.view(words, {words}) : Tensor();
  if (terms.defined()) terms_.copy_to(terms, stream);
  const Tensor used = terms.defined() ? sums_ : squares;
  runtime_.traffic.control.add(used.bytes());
  runtime_.exposed.wait(runtime_.communicator.all_reduce(used.buffer(), ReduceOp::sum, stream), stream);
  auto* const decided = reinterpret_cast<StepOutcome*>(device_outcome_.raw());
  ops::device_ops().optimizer.decide_step(decided, squares.data<std::int64_t>(),
                                          terms.defined() ? terms.data<std::int64_t>() : nullptr,
                                          device_limits_.limits(), stream);
  return {false, {.device_outcome = decided}};
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
