#include "sharding/engine/training_step.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "comm/core/error.h"

namespace rz {

TrainingStep::TrainingStep(Strategy& strategy, std::unique_ptr<Optimizer> optimizer, LrSchedule schedule,
                           ScheduleUnit schedule_unit, const DsConfig& config)
    : strategy_(strategy),
      optimizer_(std::move(optimizer)),
      rates_(std::move(schedule), *optimizer_),
      schedule_unit_(schedule_unit),
      max_norm_(config.gradient_clipping),
      skip_overflow_(config.precision.skip_overflow),
      max_skipped_(config.max_skipped_updates) {
  if (config.precision.scales_loss()) scaler_.emplace(config.precision.loss_scale);
}

TrainingStep::State TrainingStep::state() const {
  return {epochs_, scaler_ ? std::optional(scaler_->state()) : std::nullopt, rates_.plateau(), skipped_};
}

void TrainingStep::set_state(const State& state) {
  epochs_ = state.epochs;
  skipped_ = state.skipped_in_a_row;
  if (scaler_ && state.scaler) scaler_->set_state(*state.scaler);
  if (state.plateau) rates_.set_plateau(*state.plateau);
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

namespace {

/// "the loss of rank 1 is not finite"; empty if all are.
std::string describe_losses(const std::vector<std::uint8_t>& not_finite) {
  const auto ranks = std::ranges::count(not_finite, 1);
  if (ranks == 0) return "";
  if (ranks == std::ssize(not_finite)) return "the loss is not finite";
  std::string text = ranks == 1 ? "the loss of rank " : "the losses of ranks ";
  const char* separator = "";
  for (std::size_t r = 0; r < not_finite.size(); ++r)
    if (not_finite[r]) text += concat(std::exchange(separator, ", "), r);
  return text + (ranks == 1 ? " is not finite" : " are not finite");
}

/// The only rank whose loss is not finite, or -1.
int culprit_of(const std::vector<std::uint8_t>& not_finite) {
  if (not_finite.size() == 1 || std::ranges::count(not_finite, 1) != 1) return -1;
  return static_cast<int>(std::ranges::find(not_finite, 1) - not_finite.begin());
}

}  // namespace

void TrainingStep::skip_without_terms(StepReport& report) const {
  report.without_terms = true;
  require(max_skipped_ == 0 || skipped_ < max_skipped_, Errc::diverged, "update ", report.step,
          ": no update was made in ", skipped_,
          " updates in a row (ringzero.max_skipped_updates), of this one "
          "because no rank has counted a term of its losses; are all targets ignored (-100)?");
}

void TrainingStep::complete(const Stream& stream, StepReport& report, const UpdateLosses& losses,
                            Communicator& communicator) {
  counted_ = false;
  const Strategy::Outcome outcome = strategy_.outcome(*optimizer_, stream);
  report.grad_norm = outcome.norm;
  report.skipped = outcome.skipped;
  report.lr = optimizer_->learning_rate();
  report.loss_scale = loss_scale();
  skipped_ = outcome.skipped ? skipped_ + 1 : 0;
  if (!outcome.skipped) {
    if (scaler_) scaler_->update(false);
    return;
  }
  ++report.skipped_steps;
  if (std::isfinite(outcome.norm)) return skip_without_terms(report);
  const std::vector<std::uint8_t> not_finite = losses.not_finite(communicator, stream);
  const std::string found = describe_losses(not_finite);
  if (found.empty() && scaler_) scaler_->update(true);
  const bool too_many = max_skipped_ > 0 && skipped_ >= max_skipped_;
  if (skip_overflow_ && found.empty() && !too_many) return;
  const std::string why = !found.empty()   ? found
                          : skip_overflow_ ? concat("the norm of the gradients is not finite in ", skipped_,
                                                    " updates in a row (ringzero.max_skipped_updates)")
                                           : concat("the norm of the gradients is ", outcome.norm);
  throw Error(Errc::diverged,
              concat("update ", report.step, ": ", why,
                     ", and the parameters are as before; lower the learning rate, or look for a division by "
                     "zero or a logarithm of it in the loss"),
              culprit_of(not_finite));
}

}  // namespace rz
