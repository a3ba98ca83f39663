// The formula of each schedule: rate() and momentum().

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numbers>

#include "sharding/config/lr_schedule.h"

namespace rz {

namespace {

double as_double(std::int64_t x) { return static_cast<double>(x); }

double rate(const ConstantLr&, std::int64_t, const ScheduledGroup& group) { return group.base_lr; }

double rate(const LrRangeTest& s, std::int64_t step, const ScheduledGroup& group) {
  const double intervals = static_cast<double>(step) / static_cast<double>(s.step_size);
  return s.min_lr[group.index] * (1 + s.step_rate * (s.staircase ? std::floor(intervals) : intervals));
}

// ---- WarmupLR, WarmupDecayLR and WarmupCosineLR. DeepSpeed steps a scheduler after the update and begins at
// iteration -1, whose rate is the start of the warm-up. Step s is therefore iteration s - 1.

double warmup_length(std::int64_t steps) { return static_cast<double>(std::max<std::int64_t>(2, steps)); }

/// Share of the warm-up at an iteration within it.
double warmup_share(WarmupType type, double iteration, double length) {
  if (type == WarmupType::linear) return iteration / length;
  const double inverse_log = 1.0 / std::log(length);
  return inverse_log * std::log(iteration + 1);
}

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

// ---- OneCycle

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

double rate(const OneCycle& s, std::int64_t step, const ScheduledGroup& group) {
  const double low = s.min_lr[group.index], high = s.max_lr[group.index];
  const auto at = static_cast<double>(step);
  if (in_cycle(s, at)) return low + (high - low) * height(s, at);
  if (s.decay_step_size == 0 || s.decay_lr_rate == 0) return low;
  return low / (1 + s.decay_lr_rate * decay_interval(s, at));
}

/// Beta 1. DeepSpeed begins with the minimum, and only the second update has the maximum of the cycle.
double momentum(const OneCycle& s, std::int64_t step, std::size_t group) {
  const double low = s.min_momentum[group], high = s.max_momentum[group];
  const auto at = static_cast<double>(step);
  if (step == 0) return low;
  if (in_cycle(s, at)) return high - (high - low) * height(s, at);
  if (s.decay_step_size == 0 || s.decay_momentum_rate == 0) return high;
  return high * (1 + s.decay_momentum_rate * decay_interval(s, at));
}

// ---- the schedules of torch.optim.lr_scheduler

/// From 1 to 0 while `step` goes from 0 to `length`. Rounds as torch does.
double half_cosine(double step, double length) {
  return (1 + std::cos(std::numbers::pi * step / length)) / 2;
}

/// A part of a 1cycle: indices of rates {initial, max, min} and of momenta {max, base}.
struct OneCyclePhase {
  double end_step;
  int start_lr, end_lr, start_momentum, end_momentum;
};

struct OneCyclePhases {
  std::array<OneCyclePhase, 3> list;
  std::size_t count;
};

OneCyclePhases phases_of(const OneCycleLr& s) {
  const double total = as_double(s.total_steps), first = s.pct_start * total - 1;
  const OneCyclePhase up{first, 0, 1, 0, 1};
  if (!s.three_phase) return {{up, OneCyclePhase{total - 1, 1, 2, 1, 0}}, 2};
  return {{up, OneCyclePhase{2 * s.pct_start * total - 2, 1, 0, 1, 0}, OneCyclePhase{total - 1, 0, 2, 0, 0}},
          3};
}

double anneal(AnnealStrategy strategy, double start, double end, double share) {
  if (strategy == AnnealStrategy::linear) return (end - start) * share + start;
  return end + (start - end) / 2.0 * (std::cos(std::numbers::pi * share) + 1);
}

/// The phase of a step, and the share of it that has passed.
std::pair<OneCyclePhase, double> phase_at(const OneCycleLr& s, std::int64_t step) {
  const OneCyclePhases phases = phases_of(s);
  const double at = as_double(std::min(step, s.total_steps - 1));
  double start = 0;
  std::size_t i = 0;
  while (i + 1 < phases.count && at > phases.list[i].end_step) start = phases.list[i++].end_step;
  const double length = phases.list[i].end_step - start;
  return {phases.list[i], length == 0 ? 1 : (at - start) / length};
}

double rate(const StepLr& s, std::int64_t step, const ScheduledGroup& group) {
  return group.base_lr * std::pow(s.gamma, as_double(step / s.step_size));
}

double rate(const MultiStepLr& s, std::int64_t step, const ScheduledGroup& group) {
  const auto reached = std::ranges::count_if(s.milestones, [&](std::int64_t m) { return m <= step; });
  return group.base_lr * std::pow(s.gamma, as_double(reached));
}

double rate(const ConstantFactorLr& s, std::int64_t step, const ScheduledGroup& group) {
  return step < s.total_iters ? group.base_lr * s.factor : group.base_lr;
}

double rate(const LinearLr& s, std::int64_t step, const ScheduledGroup& group) {
  const double share = as_double(std::min(step, s.total_iters)) / as_double(s.total_iters);
  return group.base_lr * (s.start_factor + (s.end_factor - s.start_factor) * share);
}

double rate(const ExponentialLr& s, std::int64_t step, const ScheduledGroup& group) {
  return group.base_lr * std::pow(s.gamma, as_double(step));
}

double rate(const PolynomialLr& s, std::int64_t step, const ScheduledGroup& group) {
  const double share = as_double(std::min(step, s.total_iters)) / as_double(s.total_iters);
  return group.base_lr * std::pow(1 - share, s.power);
}

double rate(const CosineAnnealingLr& s, std::int64_t step, const ScheduledGroup& group) {
  return s.eta_min + (group.base_lr - s.eta_min) * half_cosine(as_double(step), as_double(s.t_max));
}

double rate(const CosineAnnealingWarmRestarts& s, std::int64_t step, const ScheduledGroup& group) {
  double at = as_double(step), length = as_double(s.t_0);
  if (s.t_mult == 1) at = std::fmod(at, length);
  while (at >= length) {
    at -= length;
    length *= as_double(s.t_mult);
  }
  return s.eta_min + (group.base_lr - s.eta_min) * half_cosine(at, length);
}

double rate(const OneCycleLr& s, std::int64_t step, const ScheduledGroup& group) {
  const double max = s.max_lr[group.index], initial = max / s.div_factor;
  const std::array rates{initial, max, initial / s.final_div_factor};
  const auto& [phase, share] = phase_at(s, step);
  return anneal(s.anneal_strategy, rates[static_cast<std::size_t>(phase.start_lr)],
                rates[static_cast<std::size_t>(phase.end_lr)], share);
}

double momentum(const OneCycleLr& s, std::int64_t step, std::size_t group) {
  const std::array momenta{s.max_momentum[group], s.base_momentum[group]};
  const auto& [phase, share] = phase_at(s, step);
  return anneal(s.anneal_strategy, momenta[static_cast<std::size_t>(phase.start_momentum)],
                momenta[static_cast<std::size_t>(phase.end_momentum)], share);
}

/// The base rate: that before the first metric.
double rate(const ReduceLrOnPlateau&, std::int64_t, const ScheduledGroup& group) { return group.base_lr; }

}  // namespace

double learning_rate(const LrSchedule& schedule, std::int64_t step, const ScheduledGroup& group) {
  return std::visit([&](const auto& s) { return rate(s, step, group); }, schedule);
}

std::optional<std::array<double, 2>> scheduled_betas(const LrSchedule& schedule, std::int64_t step,
                                                     std::size_t group) {
  constexpr double beta2 = 0.99;
  const auto* cycle = std::get_if<OneCycle>(&schedule);
  if (cycle == nullptr || !cycle->cycle_momentum) return std::nullopt;
  return {{momentum(*cycle, step, group), beta2}};
}

std::optional<double> scheduled_momentum(const LrSchedule& schedule, std::int64_t step, std::size_t group) {
  const auto* cycle = std::get_if<OneCycleLr>(&schedule);
  if (cycle == nullptr || !cycle->cycle_momentum) return std::nullopt;
  return momentum(*cycle, step, group);
}

namespace {

bool improves(const ReduceLrOnPlateau& s, double metric, const std::optional<double>& best) {
  constexpr double inf = std::numeric_limits<double>::infinity();
  const bool relative = s.threshold_mode == ReduceLrOnPlateau::ThresholdMode::rel;
  if (s.mode == ReduceLrOnPlateau::Mode::min) {
    const double lowest = best.value_or(inf);
    return metric < (relative ? lowest * (1.0 - s.threshold) : lowest - s.threshold);
  }
  const double greatest = best.value_or(-inf);
  return metric > (relative ? greatest * (s.threshold + 1.0) : greatest + s.threshold);
}

}  // namespace

void step(const ReduceLrOnPlateau& s, double metric, PlateauState& state, std::span<double> rates) {
  if (improves(s, metric, state.best)) {
    state.best = metric;
    state.num_bad_epochs = 0;
  } else {
    ++state.num_bad_epochs;
  }
  if (state.cooldown_counter > 0) {
    --state.cooldown_counter;
    state.num_bad_epochs = 0;
  }
  if (state.num_bad_epochs <= s.patience) return;
  for (std::size_t g = 0; g < rates.size(); ++g) {
    const double reduced = std::max(rates[g] * s.factor, s.min_lr[g]);
    if (rates[g] - reduced > s.eps) rates[g] = reduced;
  }
  state.cooldown_counter = s.cooldown;
  state.num_bad_epochs = 0;
}

}  // namespace rz
