#include "sharding/schedules/lr_schedule.h"

#include <cmath>
#include <numbers>

#include "sharding/schedules/formulas.h"

namespace rz {

namespace schedules {

double rate(const ConstantLr&, std::int64_t, const ScheduledGroup& group) { return group.base_lr; }

double rate(const LrRangeTest& s, std::int64_t step, const ScheduledGroup& group) {
  const double intervals = static_cast<double>(step) / static_cast<double>(s.step_size);
  return s.min_lr[group.index] * (1 + s.step_rate * (s.staircase ? std::floor(intervals) : intervals));
}

double rate(const CosineAnnealingLr& s, std::int64_t step, const ScheduledGroup& group) {
  const double angle = std::numbers::pi * static_cast<double>(step) / static_cast<double>(s.t_max);
  return s.eta_min + (group.base_lr - s.eta_min) * (1 + std::cos(angle)) / 2;
}

}  // namespace schedules

const char* name(WarmupType type) { return type == WarmupType::log ? "log" : "linear"; }

const char* name(const LrSchedule& schedule) {
  constexpr const char* names[] = {"constant", "WarmupLR",    "WarmupDecayLR",    "WarmupCosineLR",
                                   "OneCycle", "LRRangeTest", "CosineAnnealingLR"};
  static_assert(std::size(names) == std::variant_size_v<LrSchedule>);
  return names[schedule.index()];
}

double learning_rate(const LrSchedule& schedule, std::int64_t step, const ScheduledGroup& group) {
  return std::visit([&](const auto& s) { return schedules::rate(s, step, group); }, schedule);
}

std::optional<std::array<double, 2>> scheduled_betas(const LrSchedule& schedule, std::int64_t step,
                                                     std::size_t group) {
  constexpr double beta2 = 0.99;
  const auto* cycle = std::get_if<OneCycleLr>(&schedule);
  if (cycle == nullptr || !cycle->cycle_momentum) return std::nullopt;
  return {{schedules::momentum(*cycle, step, group), beta2}};
}

}  // namespace rz
