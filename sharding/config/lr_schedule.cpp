#include "sharding/config/lr_schedule.h"

#include <cmath>

#include "comm/core/error.h"
#include "sharding/config/schedule_formulas.h"

namespace rz {
namespace {

/// Checks of one schedule; messages begin with its name.
class FieldCheck {
 public:
  FieldCheck(const char* schedule, std::size_t groups) : schedule_(schedule), groups_(groups) {}

  void at_least(const char* field, double value, double min) const {
    require(value >= min && std::isfinite(value), Errc::invalid_argument, schedule_, ": ", field, " is ",
            value, ", expected at least ", min);
  }
  void positive(const char* field, double value) const {
    require(value > 0 && std::isfinite(value), Errc::invalid_argument, schedule_, ": ", field, " is ", value,
            ", expected more than 0");
  }
  void within(const char* field, double value, double min, double max) const {
    require(value >= min && value <= max, Errc::invalid_argument, schedule_, ": ", field, " is ", value,
            ", expected from ", min, " to ", max);
  }
  void each(const char* field, const PerGroup& values) const {
    const std::size_t n = values.values().size();
    require(n == 1 || n == groups_, Errc::invalid_argument, schedule_, ": ", field, " has ", n,
            " values for ", groups_, " parameter groups; give one value, or one for each");
    for (const double v : values.values()) at_least(field, v, 0);
  }
  void momenta(const char* field, const PerGroup& values) const {
    each(field, values);
    for (const double v : values.values())
      require(v < 1, Errc::invalid_argument, schedule_, ": ", field, " is ", v, ", expected less than 1");
  }

 private:
  const char* schedule_;
  std::size_t groups_;
};

void check_fields(const ConstantLr&, const FieldCheck&) {}

void check_fields(const WarmupLr& s, const FieldCheck& f) {
  f.each("warmup_min_lr", s.min_lr);
  if (s.max_lr) f.each("warmup_max_lr", *s.max_lr);
  f.at_least("warmup_num_steps", static_cast<double>(s.num_steps), 0);
}

void check_fields(const WarmupDecayLr& s, const FieldCheck& f) {
  f.each("warmup_min_lr", s.min_lr);
  f.each("warmup_max_lr", s.max_lr);
  f.at_least("warmup_num_steps", static_cast<double>(s.num_steps), 0);
  f.at_least("total_num_steps", static_cast<double>(s.total_num_steps), 1);
}

void check_fields(const WarmupCosineLr& s, const FieldCheck& f) {
  f.at_least("warmup_min_ratio", s.warmup_min_ratio, 0);
  f.at_least("cos_min_ratio", s.cos_min_ratio, 0);
  f.at_least("warmup_num_steps", static_cast<double>(s.num_steps), 0);
  f.at_least("total_num_steps", static_cast<double>(s.total_num_steps), 1);
}

void check_fields(const OneCycle& s, const FieldCheck& f) {
  f.each("cycle_min_lr", s.min_lr);
  f.each("cycle_max_lr", s.max_lr);
  f.each("cycle_min_mom", s.min_momentum);
  f.each("cycle_max_mom", s.max_momentum);
  f.positive("cycle_first_step_size", s.first_step_size);
  f.at_least("cycle_second_step_size", s.second_step_size.value_or(0), 0);
  f.at_least("cycle_first_stair_count", static_cast<double>(s.first_stair_count), 0);
  f.at_least("cycle_second_stair_count", static_cast<double>(s.second_stair_count.value_or(0)), 0);
  f.at_least("decay_step_size", s.decay_step_size, 0);
  f.at_least("decay_lr_rate", s.decay_lr_rate, 0);
  f.at_least("decay_mom_rate", s.decay_momentum_rate, 0);
}

void check_fields(const LrRangeTest& s, const FieldCheck& f) {
  f.each("lr_range_test_min_lr", s.min_lr);
  f.at_least("lr_range_test_step_size", static_cast<double>(s.step_size), 1);
  f.at_least("lr_range_test_step_rate", s.step_rate, 0);
}

void check_fields(const CosineAnnealingLr& s, const FieldCheck& f) {
  f.at_least("T_max", static_cast<double>(s.t_max), 1);
  f.at_least("eta_min", s.eta_min, 0);
}

void check_fields(const CosineAnnealingWarmRestarts& s, const FieldCheck& f) {
  f.at_least("T_0", static_cast<double>(s.t_0), 1);
  f.at_least("T_mult", static_cast<double>(s.t_mult), 1);
  f.at_least("eta_min", s.eta_min, 0);
}

void check_fields(const StepLr& s, const FieldCheck& f) {
  f.at_least("step_size", static_cast<double>(s.step_size), 1);
  f.at_least("gamma", s.gamma, 0);
}

void check_fields(const MultiStepLr& s, const FieldCheck& f) { f.at_least("gamma", s.gamma, 0); }

void check_fields(const ConstantFactorLr& s, const FieldCheck& f) {
  f.positive("factor", s.factor);
  f.within("factor", s.factor, 0, 1);
  f.at_least("total_iters", static_cast<double>(s.total_iters), 1);
}

void check_fields(const LinearLr& s, const FieldCheck& f) {
  f.positive("start_factor", s.start_factor);
  f.within("start_factor", s.start_factor, 0, 1);
  f.within("end_factor", s.end_factor, 0, 1);
  f.at_least("total_iters", static_cast<double>(s.total_iters), 1);
}

void check_fields(const ExponentialLr& s, const FieldCheck& f) { f.positive("gamma", s.gamma); }

void check_fields(const PolynomialLr& s, const FieldCheck& f) {
  f.at_least("total_iters", static_cast<double>(s.total_iters), 1);
  f.at_least("power", s.power, 0);
}

void check_fields(const OneCycleLr& s, const FieldCheck& f) {
  f.each("max_lr", s.max_lr);
  f.at_least("total_steps", static_cast<double>(s.total_steps), 1);
  f.within("pct_start", s.pct_start, 0, 1);
  f.momenta("base_momentum", s.base_momentum);
  f.momenta("max_momentum", s.max_momentum);
  f.positive("div_factor", s.div_factor);
  f.positive("final_div_factor", s.final_div_factor);
}

void check_fields(const ReduceLrOnPlateau& s, const FieldCheck& f) {
  f.at_least("factor", s.factor, 0);
  require(s.factor < 1, Errc::invalid_argument, "ReduceLROnPlateau: factor is ", s.factor,
          ", expected less than 1");
  f.at_least("patience", static_cast<double>(s.patience), 0);
  f.at_least("threshold", s.threshold, 0);
  f.at_least("cooldown", static_cast<double>(s.cooldown), 0);
  f.each("min_lr", s.min_lr);
  f.at_least("eps", s.eps, 0);
}

}  // namespace

void check(const LrSchedule& schedule, std::size_t groups) {
  const FieldCheck fields(name(schedule), groups);
  std::visit([&](const auto& s) { check_fields(s, fields); }, schedule);
}

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
