#include "sharding/engine/loop/training_step.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "comm/core/error.h"

namespace rz {

void check(const LrSchedule& schedule, const Optimizer& optimizer) {
  check(schedule, static_cast<std::size_t>(optimizer.groups()));
  const auto* cycle = std::get_if<OneCycleLr>(&schedule);
  if (cycle == nullptr || !cycle->cycle_momentum) return;
  for (int g = 0; g < optimizer.groups(); ++g) {
    const auto index = static_cast<std::size_t>(g);
    require(optimizer.has_momentum(g), Errc::invalid_argument,
            "OneCycleLR: cycle_momentum: ", optimizer.name(),
            " has neither betas nor a momentum above 0; set one, or cycle_momentum to false");
    const bool reaches_zero = cycle->base_momentum[index] == 0 || cycle->max_momentum[index] == 0;
    require(optimizer.has_betas(g) || !reaches_zero, Errc::invalid_argument,
            "OneCycleLR: base_momentum and max_momentum must be above 0 for ", optimizer.name());
  }
}

ScheduledRates::ScheduledRates(LrSchedule schedule, const Optimizer& optimizer)
    : schedule_(std::move(schedule)) {
  check(schedule_, optimizer);
  for (int g = 0; g < optimizer.groups(); ++g) base_rates_.push_back(optimizer.learning_rate(g));
  if (std::holds_alternative<ReduceLrOnPlateau>(schedule_)) plateau_.emplace();
}

bool ScheduledRates::scheduled() const { return !std::holds_alternative<ConstantLr>(schedule_) && !plateau_; }

void ScheduledRates::apply(std::int64_t step, Optimizer& optimizer) const {
  if (!scheduled()) return;
  for (std::size_t g = 0; g < base_rates_.size(); ++g) {
    const int group = static_cast<int>(g);
    optimizer.set_learning_rate(group,
                                learning_rate(schedule_, step, {.base_lr = base_rates_[g], .index = g}));
    const auto betas = scheduled_betas(schedule_, step, g);
    if (betas && optimizer.has_betas(group)) optimizer.set_betas(group, *betas);
    if (const auto momentum = scheduled_momentum(schedule_, step, g))
      optimizer.set_momentum(group, *momentum);
  }
}

void ScheduledRates::step(double metric, Optimizer& optimizer) {
  require(plateau_.has_value(), Errc::invalid_argument, "lr_scheduler_step(): the schedule is ",
          rz::name(schedule_), ", which counts updates by itself; only ReduceLROnPlateau takes a metric");
  std::vector<double> rates;
  for (int g = 0; g < optimizer.groups(); ++g) rates.push_back(optimizer.learning_rate(g));
  rz::step(std::get<ReduceLrOnPlateau>(schedule_), metric, *plateau_, rates);
  for (int g = 0; g < optimizer.groups(); ++g)
    optimizer.set_learning_rate(g, rates[static_cast<std::size_t>(g)]);
}

void ScheduledRates::set_plateau(const PlateauState& state) {
  if (plateau_) plateau_ = state;
}

TrainingStep::TrainingStep(Strategy& strategy, std::unique_ptr<Optimizer> optimizer, LrSchedule schedule,
                           ScheduleUnit schedule_unit, const DsConfig& config)
    : strategy_(strategy),
      optimizer_(std::move(optimizer)),
      rates_(std::move(schedule), *optimizer_),
      schedule_unit_(schedule_unit),
      skip_overflow_(config.precision.skip_overflow),
      max_skipped_(config.max_skipped_updates) {
  if (config.scales_loss()) scaler_.emplace(config.precision.loss_scale);
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

void TrainingStep::set_scale_and_rates(const Stream& stream) {
  strategy_.settings().set_loss_scale(loss_scale());
  rates_.apply(schedule_unit_ == ScheduleUnit::epoch ? epochs_ : optimizer_->updates(), *optimizer_);
  if (stream.device().kind != Device::cuda) return;
  strategy_.next_update(*optimizer_, stream);
  counted_ = true;
}

void TrainingStep::cancel() {
  if (std::exchange(counted_, false)) optimizer_->set_updates(optimizer_->updates() - 1);
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
