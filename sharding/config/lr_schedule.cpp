#include "sharding/config/lr_schedule.h"

#include <cmath>

#include "sharding/config/schedule_formulas.h"

namespace rz {

namespace schedules {

double rate(const ConstantLr&, std::int64_t, const ScheduledGroup& group) { return group.base_lr; }

double rate(const LrRangeTest& s, std::int64_t step, const ScheduledGroup& group) {
  const double intervals = static_cast<double>(step) / static_cast<double>(s.step_size);
  return s.min_lr[group.index] * (1 + s.step_rate * (s.staircase ? std::floor(intervals) : intervals));
}

}  // namespace schedules

const char* name(WarmupType type) { return type == WarmupType::log ? "log" : "linear"; }

const char* name(const LrSchedule& schedule) {
  constexpr const char* names[] = {"constant",
                                   "WarmupLR",
                                   "WarmupDecayLR",
                                   "WarmupCosineLR",
                                   "OneCycle",
                                   "LRRangeTest",
                                   "StepLR",
                                   "MultiStepLR",
                                   "ConstantLR",
                                   "LinearLR",
                                   "ExponentialLR",
                                   "PolynomialLR",
                                   "CosineAnnealingLR",
                                   "CosineAnnealingWarmRestarts",
                                   "OneCycleLR",
                                   "ReduceLROnPlateau"};
  static_assert(std::size(names) == std::variant_size_v<LrSchedule>);
  return names[schedule.index()];
}

double learning_rate(const LrSchedule& schedule, std::int64_t step, const ScheduledGroup& group) {
  return std::visit([&](const auto& s) { return schedules::rate(s, step, group); }, schedule);
}

std::optional<std::array<double, 2>> scheduled_betas(const LrSchedule& schedule, std::int64_t step,
                                                     std::size_t group) {
  constexpr double beta2 = 0.99;
  const auto* cycle = std::get_if<OneCycle>(&schedule);
  if (cycle == nullptr || !cycle->cycle_momentum) return std::nullopt;
  return {{schedules::momentum(*cycle, step, group), beta2}};
}

std::optional<double> scheduled_momentum(const LrSchedule& schedule, std::int64_t step, std::size_t group) {
  const auto* cycle = std::get_if<OneCycleLr>(&schedule);
  if (cycle == nullptr || !cycle->cycle_momentum) return std::nullopt;
  return schedules::momentum(*cycle, step, group);
}

}  // namespace rz
