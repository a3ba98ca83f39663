#include <cmath>

#include "sharding/config/schedule_formulas.h"

namespace rz::schedules {
namespace {

double cycle_length(const OneCycle& s) {
  return s.first_step_size + s.second_step_size.value_or(s.first_step_size);
}

/// The height in the cycle, held flat over each of `stairs` stairs. It is computed from whole steps, so that
/// rounding of the height does not lose a stair.
double stair_height(const OneCycle& s, double step, double stairs) {
  const double total = cycle_length(s), at = std::fmod(step, total);
  const double position = at <= s.first_step_size
                              ? at * stairs / s.first_step_size
                              : (total - at) * stairs / s.second_step_size.value_or(s.first_step_size);
  return std::floor(position) / stairs;
}

/// 0 at both ends of the cycle, 1 at its top.
double height(const OneCycle& s, double step) {
  const double total = cycle_length(s), top = s.first_step_size / total;
  const double cycle = std::floor(1 + step / total);
  const double x = 1. + step / total - cycle;
  const bool up = x <= top;
  const auto stairs =
      static_cast<double>(up ? s.first_stair_count : s.second_stair_count.value_or(s.first_stair_count));
  if (stairs > 0) return stair_height(s, step, stairs);
  return up ? x / top : (x - 1) / (top - 1);
}

/// True in the cycle, and in its last step, which DeepSpeed counts to it.
bool in_cycle(const OneCycle& s, double step) { return step - 1 < cycle_length(s); }

/// Steps of the decay, in units of its step size.
double decay_interval(const OneCycle& s, double step) {
  return (step - 1 - cycle_length(s) + 1) / s.decay_step_size;
}

}  // namespace

double rate(const OneCycle& s, std::int64_t step, const ScheduledGroup& group) {
  const double low = s.min_lr[group.index], high = s.max_lr[group.index];
  const auto at = static_cast<double>(step);
  if (in_cycle(s, at)) return low + (high - low) * height(s, at);
  if (s.decay_step_size == 0 || s.decay_lr_rate == 0) return low;
  return low / (1 + s.decay_lr_rate * decay_interval(s, at));
}

double momentum(const OneCycle& s, std::int64_t step, std::size_t group) {
  const double low = s.min_momentum[group], high = s.max_momentum[group];
  const auto at = static_cast<double>(step);
  if (step == 0) return low;
  if (in_cycle(s, at)) return high - (high - low) * height(s, at);
  if (s.decay_step_size == 0 || s.decay_momentum_rate == 0) return high;
  return high * (1 + s.decay_momentum_rate * decay_interval(s, at));
}

}  // namespace rz::schedules
