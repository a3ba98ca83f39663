#include "sharding/update/step_control.h"

#include <cmath>
#include <cstring>

#include "comm/core/error.h"
#include "comm/device/allocate.h"
#include "sharding/optim/grad_norm.h"
#include "tensor/kernels/device_ops.h"

namespace rz {

StepControl::StepControl(const ShardedModel& model, Runtime& runtime) : model_(model), runtime_(runtime) {}

void StepControl::set_loss_scale(double scale) {
  require(scale > 0 && std::isfinite(scale), Errc::invalid_argument, "set_loss_scale(", scale,
          "): the factor must be positive and finite");
  loss_scale_ = scale;
}

/// Adds each element exactly once over all ranks.
void StepControl::add_squares(SquareSum& sum) const {
  const FlatLayout& layout = model_.layout();
  for (int b = 0; b < layout.size(); ++b) {
    const Range own = layout.shard(b);
    sum.add(model_.gradients().mean(b).view(own.begin - layout.updated(b).begin, {own.count()}));
  }
}

double StepControl::sum_over_ranks(const SquareSum& sum) {
  ExactSum total = sum.read();
  runtime_.exposed.measure([&] { total.all_reduce(runtime_.communicator); });
  return total.value();
}

double StepControl::norm(const Stream& stream) {
  SquareSum sum(stream, norm_words_);
  add_squares(sum);
  return step_outcome(sum_over_ranks(sum), {.loss_scale = loss_scale_}).norm;
}

double StepControl::clip(double max_norm, const Stream& stream) {
  const double before = norm(stream);
  clip_factor_ = clip_factor(before, max_norm);
  return before;
}

StepControl::Decision StepControl::decide(const Policy& policy, const Stream& stream) {
  const StepLimits limits{policy.max_norm, loss_scale_, policy.skip_overflow};
  SquareSum sum(stream, norm_words_);
  add_squares(sum);
  if (stream.device().kind == Device::host) {
    outcome_ = step_outcome(sum_over_ranks(sum), limits);
    return {outcome_.skip != 0, {.factor = outcome_.grad_scale}};
  }
  const Tensor& words = sum.words();
  runtime_.exposed.wait(runtime_.communicator.all_reduce(words.buffer(), ReduceOp::sum, stream), stream);
  if (!device_outcome_.defined())
    device_outcome_ = Tensor::empty({sizeof(StepOutcome)}, DType::u8, allocator_on(stream.device()));
  auto* const decided = reinterpret_cast<StepOutcome*>(device_outcome_.raw());
  ops::device_ops().optimizer.decide_step(decided, words.data<std::int64_t>(), limits, stream);
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
