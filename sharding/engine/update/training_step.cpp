#include "sharding/engine/update/training_step.h"

#include <cmath>
#include <utility>

#include "comm/core/error.h"

namespace rz {

TrainingStep::TrainingStep(Strategy& strategy, std::unique_ptr<Optimizer> optimizer, LrSchedule schedule,
                           ScheduleUnit schedule_unit, const DsConfig& config)
    : strategy_(strategy),
      optimizer_(std::move(optimizer)),
      rates_(std::move(schedule), *optimizer_),
      schedule_unit_(schedule_unit),
      max_norm_(config.gradient_clipping),
      skip_overflow_(config.precision.skip_overflow) {
  if (config.precision.scales_loss()) scaler_.emplace(config.precision.loss_scale);
}

TrainingStep::State TrainingStep::state() const {
  return {epochs_, scaler_ ? std::optional(scaler_->state()) : std::nullopt};
}

void TrainingStep::set_state(const State& state) {
  epochs_ = state.epochs;
  if (scaler_ && state.scaler) scaler_->set_state(*state.scaler);
}

void TrainingStep::prepare(const Stream& stream) {
  strategy_.settings().set_loss_scale(loss_scale());
  rates_.apply(schedule_unit_ == ScheduleUnit::epoch ? epochs_ : optimizer_->updates(), *optimizer_);
  if (stream.device().kind != Device::cuda) return;
  strategy_.next_update(*optimizer_, stream);
  counted_ = true;
}

void TrainingStep::cancel() {
  if (std::exchange(counted_, false)) optimizer_->set_updates(optimizer_->updates() - 1);
}

void TrainingStep::apply(const Stream& stream) {
  strategy_.finish_gradients(stream);
  // An update that is not finite never happens; without skip_overflow it is an error, in complete().
  strategy_.clip_and_step(*optimizer_, {.max_norm = max_norm_, .skip_overflow = true}, stream);
}

void TrainingStep::complete(const Stream& stream, StepReport& report) {
  counted_ = false;
  const Strategy::Outcome outcome = strategy_.outcome(*optimizer_, stream);
  report.grad_norm = outcome.norm;
  report.skipped = outcome.skipped;
  report.lr = optimizer_->learning_rate();
  report.loss_scale = loss_scale();
  if (outcome.skipped) ++report.skipped_steps;
  if (scaler_) scaler_->update(outcome.skipped);
  require(!outcome.skipped || skip_overflow_, Errc::diverged, "update ", report.step,
          ": the norm of the gradients is ", outcome.norm, " and the parameters are as before; lower the ",
          "learning rate, or look for a division by zero or a logarithm of it in the loss");
}

}  // namespace rz
