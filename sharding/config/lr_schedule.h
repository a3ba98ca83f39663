#pragma once
/// Learning-rate schedules as values. A schedule is a pure function of the number of steps made: an engine
/// counts updates, a loop by hand may count epochs. Rates and betas of DeepSpeed's schedules have the bits of
/// DeepSpeed 0.19 (deepspeed/runtime/lr_schedules.py), computed in double in its order of operations; those
/// of torch's are closed forms of torch 2.15 (torch/optim/lr_scheduler.py).
///
///     const LrSchedule schedule = WarmupLr{.max_lr = 1e-3, .num_steps = 100};
///     for (std::int64_t s = 0; s < updates; ++s) {
///       optimizer->set_learning_rate(learning_rate(schedule, s, {.base_lr = 1e-3}));
///       …
///
/// Step s is the rate of the update after s updates. DeepSpeed's warm-up schedules lag: steps 0 and 1 both
/// have the start of the warm-up. The others do not lag.
///
/// ReduceLrOnPlateau is the exception: its rates follow metrics, which step() counts.

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <utility>
#include <variant>
#include <vector>

namespace rz {

/// One value for all parameter groups, or one for each group.
class PerGroup {
 public:
  PerGroup(double value) : values_{value} {}  // NOLINT: a plain number is a value for all groups
  PerGroup(std::initializer_list<double> values) : values_(values) {}
  explicit PerGroup(std::vector<double> values) : values_(std::move(values)) {}
  double operator[](std::size_t group) const { return values_.size() == 1 ? values_[0] : values_.at(group); }
  const std::vector<double>& values() const { return values_; }
  bool operator==(const PerGroup&) const = default;

 private:
  std::vector<double> values_;
};

/// The rate that the group was created with.
struct ConstantLr {
  bool operator==(const ConstantLr&) const = default;
};

/// Shape of a warm-up over N steps: ln(i + 1) / ln(N), or i / N.
enum class WarmupType { log, linear };

/// From min_lr to max_lr in num_steps, then max_lr.
struct WarmupLr {
  PerGroup min_lr = 0.0;
  std::optional<PerGroup> max_lr;  ///< absent: the base rate of each group
  std::int64_t num_steps = 1000;   ///< 0 and 1 count as 2
  WarmupType type = WarmupType::log;
  bool operator==(const WarmupLr&) const = default;
};

/// WarmupLr, then linearly down to min_lr at total_num_steps.
struct WarmupDecayLr {
  std::int64_t total_num_steps = 0;
  PerGroup min_lr = 0.0, max_lr = 0.001;
  std::int64_t num_steps = 1000;
  WarmupType type = WarmupType::log;
  bool operator==(const WarmupDecayLr&) const = default;
};

/// Ratios of the base rate: warm-up from min_ratio to 1, then half a cosine down to cos_min_ratio at
/// total_num_steps. Step 0 has rate 0.
struct WarmupCosineLr {
  std::int64_t total_num_steps = 0;
  double warmup_min_ratio = 0;
  std::int64_t num_steps = 1000;
  double cos_min_ratio = 1e-4;
  WarmupType type = WarmupType::log;
  bool operator==(const WarmupCosineLr&) const = default;
};

/// Smith, arXiv:1803.09820: up from min_lr to max_lr, down again, then decay below min_lr by
/// 1 / (1 + decay_lr_rate · steps / decay_step_size). Beta 1 moves the opposite way; beta 2 is then 0.99.
struct OneCycle {
  PerGroup min_lr = 0.0, max_lr = 0.0;
  double decay_lr_rate = 0;
  double first_step_size = 2000;           ///< steps of the way up; above 0
  std::optional<double> second_step_size;  ///< absent: as the first
  std::int64_t first_stair_count = 0;      ///< the way in this many stairs; 0: continuous
  std::optional<std::int64_t> second_stair_count;
  double decay_step_size = 0;  ///< 0: no decay
  bool cycle_momentum = true;  ///< for optimizers with betas
  PerGroup min_momentum = 0.8, max_momentum = 0.9;
  double decay_momentum_rate = 0;
  bool operator==(const OneCycle&) const = default;
};

/// Smith, arXiv:1803.09820: min_lr · (1 + step_rate · steps / step_size), to find the largest useful rate.
struct LrRangeTest {
  PerGroup min_lr = 1e-3;
  std::int64_t step_size = 2000;
  double step_rate = 1;
  bool staircase = false;  ///< whole intervals only
  bool operator==(const LrRangeTest&) const = default;
};

// ---- torch.optim.lr_scheduler, with its names and defaults. Rates are torch's closed forms; torch itself
// multiplies the last rate by a factor per step, whose rounding differs.

/// The base rate times gamma every step_size steps.
struct StepLr {
  std::int64_t step_size = 0;  ///< at least 1
  double gamma = 0.1;
  bool operator==(const StepLr&) const = default;
};

/// The base rate times gamma at each milestone; one that is listed twice counts twice.
struct MultiStepLr {
  std::vector<std::int64_t> milestones;  ///< steps, in any order
  double gamma = 0.1;
  bool operator==(const MultiStepLr&) const = default;
};

/// torch's ConstantLR: the base rate times factor in the first total_iters steps, then the base rate.
struct ConstantFactorLr {
  double factor = 1.0 / 3;  ///< above 0, up to 1
  std::int64_t total_iters = 5;
  bool operator==(const ConstantFactorLr&) const = default;
};

/// The base rate times a factor that moves linearly from start_factor to end_factor in total_iters steps.
struct LinearLr {
  double start_factor = 1.0 / 3;  ///< above 0, up to 1
  double end_factor = 1;          ///< from 0 to 1
  std::int64_t total_iters = 5;
  bool operator==(const LinearLr&) const = default;
};

/// The base rate times gamma per step.
struct ExponentialLr {
  double gamma = 0;  ///< above 0
  bool operator==(const ExponentialLr&) const = default;
};

/// The base rate times (1 - steps / total_iters)^power, then 0.
struct PolynomialLr {
  std::int64_t total_iters = 5;
  double power = 1;
  bool operator==(const PolynomialLr&) const = default;
};

/// Loshchilov and Hutter, arXiv:1608.03983, without restarts: half cosines between the base rate and eta_min,
/// t_max steps each.
struct CosineAnnealingLr {
  std::int64_t t_max = 1;
  double eta_min = 0;
  bool operator==(const CosineAnnealingLr&) const = default;
};

/// The same with restarts: from the base rate to eta_min in t_0 steps, then again, each time t_mult times as
/// long.
struct CosineAnnealingWarmRestarts {
  std::int64_t t_0 = 0;  ///< at least 1
  std::int64_t t_mult = 1;
  double eta_min = 0;
  bool operator==(const CosineAnnealingWarmRestarts&) const = default;
};

enum class AnnealStrategy { cos, linear };

/// Smith and Topin, arXiv:1708.07120: from max_lr / div_factor up to max_lr, and down to
/// max_lr / div_factor / final_div_factor in the last of total_steps steps. Later steps keep that rate, where
/// torch throws. The momentum, or beta 1, moves the opposite way; beta 2 stays.
struct OneCycleLr {
  PerGroup max_lr = 0.0;
  std::int64_t total_steps = 0;  ///< at least 1; torch also takes epochs and steps_per_epoch
  double pct_start = 0.3;        ///< share of the way up
  AnnealStrategy anneal_strategy = AnnealStrategy::cos;
  bool cycle_momentum = true;
  PerGroup base_momentum = 0.85, max_momentum = 0.95;
  double div_factor = 25, final_div_factor = 1e4;
  bool three_phase = false;  ///< up, symmetrically down, then to the lowest rate
  bool operator==(const OneCycleLr&) const = default;
};

/// The rate times factor when a metric has not improved in more than `patience` of its values. The rates
/// depend on metrics (PlateauState), not on the number of steps.
struct ReduceLrOnPlateau {
  enum class Mode { min, max };           ///< whether a smaller or a greater metric is better
  enum class ThresholdMode { rel, abs };  ///< threshold is a share of the best metric, or a difference
  Mode mode = Mode::min;
  double factor = 0.1;  ///< below 1
  std::int64_t patience = 10;
  double threshold = 1e-4;  ///< what an improvement must exceed
  ThresholdMode threshold_mode = ThresholdMode::rel;
  std::int64_t cooldown = 0;  ///< values after a reduction that do not count as bad
  PerGroup min_lr = 0.0;
  double eps = 1e-8;  ///< a smaller reduction is not made
  bool operator==(const ReduceLrOnPlateau&) const = default;
};

/// What ReduceLrOnPlateau knows of the metrics so far.
struct PlateauState {
  std::optional<double> best;
  std::int64_t num_bad_epochs = 0, cooldown_counter = 0;
  bool operator==(const PlateauState&) const = default;
};

using LrSchedule =
    std::variant<ConstantLr, WarmupLr, WarmupDecayLr, WarmupCosineLr, OneCycle, LrRangeTest, StepLr,
                 MultiStepLr, ConstantFactorLr, LinearLr, ExponentialLr, PolynomialLr, CosineAnnealingLr,
                 CosineAnnealingWarmRestarts, OneCycleLr, ReduceLrOnPlateau>;

/// A parameter group.
struct ScheduledGroup {
  double base_lr = 0;     ///< the rate that the optimizer was created with
  std::size_t index = 0;  ///< its place in the lists of the schedule
};

const char* name(WarmupType);  ///< "log", "linear"
/// The name in a DeepSpeed configuration: "WarmupLR", "OneCycle", "StepLR", …; "constant" for ConstantLr.
const char* name(const LrSchedule&);

/// Errc::invalid_argument names the field that is out of range, or a list that has not one value for each of
/// `groups`.
void check(const LrSchedule&, std::size_t groups = 1);
/// The rate after `step` steps, from 0. The schedule must pass check().
double learning_rate(const LrSchedule&, std::int64_t step, const ScheduledGroup&);
/// Beta 1 and beta 2 after `step` steps, if the schedule sets both, as OneCycle.
std::optional<std::array<double, 2>> scheduled_betas(const LrSchedule&, std::int64_t step,
                                                     std::size_t group = 0);
/// The momentum, or beta 1 of an optimizer with betas, after `step` steps, if the schedule sets it alone, as
/// OneCycleLr.
std::optional<double> scheduled_momentum(const LrSchedule&, std::int64_t step, std::size_t group = 0);

/// Counts a metric, and reduces the rates of all groups where it has not improved for long enough. A NaN does
/// not improve.
void step(const ReduceLrOnPlateau&, double metric, PlateauState&, std::span<double> rates);

/// What a schedule counts.
enum class ScheduleUnit { update, epoch };

}  // namespace rz
