// The schedules of torch.optim.lr_scheduler.

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numbers>

#include "sharding/config/lr_schedule.h"
#include "sharding/config/schedule_formulas.h"

namespace rz {

namespace schedules {
namespace {

double as_double(std::int64_t x) { return static_cast<double>(x); }

/// From 1 to 0 while `step` goes from 0 to `length`. Rounds as torch does.
double half_cosine(double step, double length) {
  return (1 + std::cos(std::numbers::pi * step / length)) / 2;
}

/// A part of a 1cycle: indices of rates {initial, max, min} and of momenta {max, base}.
struct Phase {
  double end_step;
  int start_lr, end_lr, start_momentum, end_momentum;
};

struct Phases {
  std::array<Phase, 3> list;
  std::size_t count;
};

Phases phases_of(const OneCycleLr& s) {
  const double total = as_double(s.total_steps), first = s.pct_start * total - 1;
  const Phase up{first, 0, 1, 0, 1};
  if (!s.three_phase) return {{up, Phase{total - 1, 1, 2, 1, 0}}, 2};
  return {{up, Phase{2 * s.pct_start * total - 2, 1, 0, 1, 0}, Phase{total - 1, 0, 2, 0, 0}}, 3};
}

double anneal(AnnealStrategy strategy, double start, double end, double share) {
  if (strategy == AnnealStrategy::linear) return (end - start) * share + start;
  return end + (start - end) / 2.0 * (std::cos(std::numbers::pi * share) + 1);
}

/// The phase of a step, and the share of it that has passed.
std::pair<Phase, double> phase_at(const OneCycleLr& s, std::int64_t step) {
  const Phases phases = phases_of(s);
  const double at = as_double(std::min(step, s.total_steps - 1));
  double start = 0;
  std::size_t i = 0;
  while (i + 1 < phases.count && at > phases.list[i].end_step) start = phases.list[i++].end_step;
  const double length = phases.list[i].end_step - start;
  return {phases.list[i], length == 0 ? 1 : (at - start) / length};
}

}  // namespace

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

double rate(const ReduceLrOnPlateau&, std::int64_t, const ScheduledGroup& group) { return group.base_lr; }

}  // namespace schedules

namespace {

bool improves(const ReduceLrOnPlateau& s, double metric, const std::optional<double>& best) {
  constexpr double inf = std::numeric_limits<double>::infinity();
  const bool relative = s.threshold_mode == ReduceLrOnPlateau::ThresholdMode::rel;
  if (s.mode == ReduceLrOnPlateau::Mode::min) {
    const double least = best.value_or(inf);
    return metric < (relative ? least * (1.0 - s.threshold) : least - s.threshold);
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
