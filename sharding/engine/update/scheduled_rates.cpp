#include "sharding/engine/update/scheduled_rates.h"

#include <utility>
#include <variant>

namespace rz {

ScheduledRates::ScheduledRates(LrSchedule schedule, const Optimizer& optimizer)
    : schedule_(std::move(schedule)) {
  check(schedule_, static_cast<std::size_t>(optimizer.groups()));
  for (int g = 0; g < optimizer.groups(); ++g) base_rates_.push_back(optimizer.learning_rate(g));
}

bool ScheduledRates::scheduled() const { return !std::holds_alternative<ConstantLr>(schedule_); }

void ScheduledRates::apply(std::int64_t step, Optimizer& optimizer) const {
  if (!scheduled()) return;
  for (std::size_t g = 0; g < base_rates_.size(); ++g) {
    const int group = static_cast<int>(g);
    optimizer.set_learning_rate(group,
                                learning_rate(schedule_, step, {.base_lr = base_rates_[g], .index = g}));
    const auto betas = scheduled_betas(schedule_, step, g);
    if (betas && optimizer.has_betas(group)) optimizer.set_betas(group, *betas);
  }
}

}  // namespace rz
