#include "comm/core/error.h"
#include "sharding/config/typed.h"

namespace rz::ds {
namespace {

/// Keys of "scheduler.params".
class ScheduleParameters {
 public:
  ScheduleParameters(const Settings& settings, const std::string& file) : file(file), settings_(settings) {}

  const std::string& file;

  const nlohmann::json& at(const char* key) const { return settings_.at(concat("scheduler.params.", key)); }
  template <class T>
  T get(const char* key) const {
    return at(key).get<T>();
  }
  template <class T>
  std::optional<T> optional(const char* key) const {
    return at(key).is_null() ? std::nullopt : std::optional(get<T>(key));
  }
  PerGroup per_group(const char* key) const {
    return at(key).is_array() ? PerGroup(get<std::vector<double>>(key)) : PerGroup(get<double>(key));
  }
  WarmupType warmup_type() const {
    return get<std::string>("warmup_type") == "log" ? WarmupType::log : WarmupType::linear;
  }

 private:
  const Settings& settings_;
};

LrSchedule warmup(const ScheduleParameters& p) {
  WarmupLr s;
  s.min_lr = p.per_group("warmup_min_lr");
  if (!p.at("warmup_max_lr").is_null()) s.max_lr = p.per_group("warmup_max_lr");
  s.num_steps = p.get<std::int64_t>("warmup_num_steps");
  s.type = p.warmup_type();
  return s;
}

LrSchedule warmup_decay(const ScheduleParameters& p) {
  WarmupDecayLr s;
  s.total_num_steps = p.get<std::int64_t>("total_num_steps");
  s.min_lr = p.per_group("warmup_min_lr");
  s.max_lr = p.per_group("warmup_max_lr");
  s.num_steps = p.get<std::int64_t>("warmup_num_steps");
  s.type = p.warmup_type();
  return s;
}

LrSchedule warmup_cosine(const ScheduleParameters& p) {
  WarmupCosineLr s;
  s.total_num_steps = p.get<std::int64_t>("total_num_steps");
  s.warmup_min_ratio = p.get<double>("warmup_min_ratio");
  s.num_steps = p.get<std::int64_t>("warmup_num_steps");
  s.cos_min_ratio = p.get<double>("cos_min_ratio");
  s.type = p.warmup_type();
  return s;
}

LrSchedule one_cycle(const ScheduleParameters& p) {
  OneCycle s;
  s.min_lr = p.per_group("cycle_min_lr");
  s.max_lr = p.per_group("cycle_max_lr");
  s.decay_lr_rate = p.get<double>("decay_lr_rate");
  s.first_step_size = p.get<double>("cycle_first_step_size");
  s.second_step_size = p.optional<double>("cycle_second_step_size");
  s.first_stair_count = p.get<std::int64_t>("cycle_first_stair_count");
  s.second_stair_count = p.optional<std::int64_t>("cycle_second_stair_count");
  s.decay_step_size = p.get<double>("decay_step_size");
  s.cycle_momentum = p.get<bool>("cycle_momentum");
  s.min_momentum = p.per_group("cycle_min_mom");
  s.max_momentum = p.per_group("cycle_max_mom");
  s.decay_momentum_rate = p.get<double>("decay_mom_rate");
  return s;
}

LrSchedule range_test(const ScheduleParameters& p) {
  LrRangeTest s;
  s.min_lr = p.per_group("lr_range_test_min_lr");
  s.step_size = p.get<std::int64_t>("lr_range_test_step_size");
  s.step_rate = p.get<double>("lr_range_test_step_rate");
  s.staircase = p.get<bool>("lr_range_test_staircase");
  return s;
}

LrSchedule cosine_annealing(const ScheduleParameters& p) {
  return CosineAnnealingLr{.t_max = p.get<std::int64_t>("T_max"), .eta_min = p.get<double>("eta_min")};
}

LrSchedule step_lr(const ScheduleParameters& p) {
  return StepLr{.step_size = p.get<std::int64_t>("step_size"), .gamma = p.get<double>("gamma")};
}

LrSchedule multi_step(const ScheduleParameters& p) {
  return MultiStepLr{.milestones = p.get<std::vector<std::int64_t>>("milestones"),
                     .gamma = p.get<double>("gamma")};
}

LrSchedule constant_factor(const ScheduleParameters& p) {
  return ConstantFactorLr{.factor = p.get<double>("factor"),
                          .total_iters = p.get<std::int64_t>("total_iters")};
}

LrSchedule linear(const ScheduleParameters& p) {
  return LinearLr{.start_factor = p.get<double>("start_factor"),
                  .end_factor = p.get<double>("end_factor"),
                  .total_iters = p.get<std::int64_t>("total_iters")};
}

LrSchedule exponential(const ScheduleParameters& p) { return ExponentialLr{.gamma = p.get<double>("gamma")}; }

LrSchedule polynomial(const ScheduleParameters& p) {
  return PolynomialLr{.total_iters = p.get<std::int64_t>("total_iters"), .power = p.get<double>("power")};
}

LrSchedule warm_restarts(const ScheduleParameters& p) {
  return CosineAnnealingWarmRestarts{.t_0 = p.get<std::int64_t>("T_0"),
                                     .t_mult = p.get<std::int64_t>("T_mult"),
                                     .eta_min = p.get<double>("eta_min")};
}

LrSchedule torch_one_cycle(const ScheduleParameters& p) {
  OneCycleLr s;
  s.max_lr = p.per_group("max_lr");
  if (const auto total = p.optional<std::int64_t>("total_steps")) {
    s.total_steps = *total;
  } else {
    const auto epochs = p.optional<std::int64_t>("epochs"),
               of_epoch = p.optional<std::int64_t>("steps_per_epoch");
    require(epochs && of_epoch, Errc::config, p.file,
            ": scheduler.params.total_steps: missing; give it, or both epochs and steps_per_epoch");
    s.total_steps = *epochs * *of_epoch;
  }
  s.pct_start = p.get<double>("pct_start");
  s.anneal_strategy =
      p.get<std::string>("anneal_strategy") == "cos" ? AnnealStrategy::cos : AnnealStrategy::linear;
  s.cycle_momentum = p.get<bool>("cycle_momentum");
  s.base_momentum = p.per_group("base_momentum");
  s.max_momentum = p.per_group("max_momentum");
  s.div_factor = p.get<double>("div_factor");
  s.final_div_factor = p.get<double>("final_div_factor");
  s.three_phase = p.get<bool>("three_phase");
  return s;
}

LrSchedule plateau(const ScheduleParameters& p) {
  using P = ReduceLrOnPlateau;
  P s;
  s.mode = p.get<std::string>("mode") == "min" ? P::Mode::min : P::Mode::max;
  s.factor = p.get<double>("factor");
  s.patience = p.get<std::int64_t>("patience");
  s.threshold = p.get<double>("threshold");
  s.threshold_mode =
      p.get<std::string>("threshold_mode") == "rel" ? P::ThresholdMode::rel : P::ThresholdMode::abs;
  s.cooldown = p.get<std::int64_t>("cooldown");
  s.min_lr = p.per_group("min_lr");
  s.eps = p.get<double>("eps");
  return s;
}

LrSchedule schedule_named(const std::string& type, const ScheduleParameters& p) {
  constexpr std::pair<std::string_view, LrSchedule (*)(const ScheduleParameters&)> makers[] = {
      {"WarmupLR", warmup},
      {"WarmupDecayLR", warmup_decay},
      {"WarmupCosineLR", warmup_cosine},
      {"OneCycle", one_cycle},
      {"LRRangeTest", range_test},
      {"StepLR", step_lr},
      {"MultiStepLR", multi_step},
      {"ConstantLR", constant_factor},
      {"LinearLR", linear},
      {"ExponentialLR", exponential},
      {"PolynomialLR", polynomial},
      {"CosineAnnealingLR", cosine_annealing},
      {"CosineAnnealingWarmRestarts", warm_restarts},
      {"OneCycleLR", torch_one_cycle},
      {"ReduceLROnPlateau", plateau}};
  for (const auto& [name, make] : makers)
    if (name == type) return make(p);
  fail(Errc::invalid_argument, "no schedule ", type);
}

/// DeepSpeed warns of a total that the warm-up exceeds.
void warn_of_total(const Settings& s, const std::string& file, std::vector<std::string>& warnings) {
  const auto* total = s.find("scheduler.params.total_num_steps");
  const auto* warm = s.find("scheduler.params.warmup_num_steps");
  if (total && warm && total->value.get<std::int64_t>() < warm->value.get<std::int64_t>())
    warnings.push_back(concat(file, ": scheduler.params.total_num_steps: is ", total->value.dump(),
                              ", less than the warm-up of ", warm->value.dump()));
}

}  // namespace

LrSchedule typed_schedule(const Settings& settings, const std::string& file,
                          std::vector<std::string>& warnings) {
  if (!settings.has_section("scheduler")) return ConstantLr{};
  warn_of_total(settings, file, warnings);
  return schedule_named(settings.text("scheduler.type"), ScheduleParameters(settings, file));
}

}  // namespace rz::ds
