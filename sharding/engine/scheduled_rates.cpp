#include "sharding/engine/scheduled_rates.h"

#include <utility>
#include <variant>

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

}  // namespace rz
