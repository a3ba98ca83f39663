// WarmupLR, WarmupDecayLR and WarmupCosineLR. DeepSpeed steps a scheduler after the update and begins at
// iteration -1, whose rate is the start of the warm-up. Step s is therefore iteration s - 1.

#include <algorithm>
#include <cmath>
#include <numbers>

#include "sharding/config/schedule_formulas.h"

namespace rz::schedules {
namespace {

double warmup_length(std::int64_t steps) { return static_cast<double>(std::max<std::int64_t>(2, steps)); }

/// Share of the warm-up at an iteration within it.
double warmup_share(WarmupType type, double iteration, double length) {
  if (type == WarmupType::linear) return iteration / length;
  const double inverse_log = 1.0 / std::log(length);
  return inverse_log * std::log(iteration + 1);
}

}  // namespace

double rate(const WarmupLr& s, std::int64_t step, const ScheduledGroup& group) {
  const double low = s.min_lr[group.index], length = warmup_length(s.num_steps);
  const double high = s.max_lr ? (*s.max_lr)[group.index] : group.base_lr;
  const auto iteration = static_cast<double>(step - 1);
  if (iteration < 0) return low;
  const double share = iteration < length ? warmup_share(s.type, iteration, length) : 1.0;
  return low + (high - low) * share;
}

double rate(const WarmupDecayLr& s, std::int64_t step, const ScheduledGroup& group) {
  const double low = s.min_lr[group.index], high = s.max_lr[group.index];
  const double length = warmup_length(s.num_steps), total = static_cast<double>(s.total_num_steps);
  const auto iteration = static_cast<double>(step - 1);
  if (iteration < 0) return low;
  const double share = iteration < length
                           ? warmup_share(s.type, iteration, length)
                           : std::max(0.0, (total - iteration) / std::max(1.0, total - length));
  return low + (high - low) * share;
}

double rate(const WarmupCosineLr& s, std::int64_t step, const ScheduledGroup& group) {
  const double length = warmup_length(s.num_steps), total = static_cast<double>(s.total_num_steps);
  const auto iteration = static_cast<double>(step - 1);
  if (iteration < 0) return 0;
  if (iteration < length) {
    const double share = warmup_share(s.type, iteration, length);
    return group.base_lr * (s.warmup_min_ratio + share * (1.0 - s.warmup_min_ratio));
  }
  const double progress = std::min(1.0, (iteration - length + 1) / std::max(1.0, total - length));
  const double wave = (1 + std::cos(std::numbers::pi * progress)) / 2;
  return group.base_lr * std::max(0.0, s.cos_min_ratio + (1.0 - s.cos_min_ratio) * wave);
}

}  // namespace rz::schedules
