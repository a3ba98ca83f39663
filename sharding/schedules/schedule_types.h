#pragma once
/// The kinds of learning-rate schedules, as plain values.

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
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
  std::int64_t num_steps = 1000;   ///< 1 counts as 2
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
struct OneCycleLr {
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
  bool operator==(const OneCycleLr&) const = default;
};

/// Smith, arXiv:1803.09820: min_lr · (1 + step_rate · steps / step_size), to find the largest useful rate.
struct LrRangeTest {
  PerGroup min_lr = 1e-3;
  std::int64_t step_size = 2000;
  double step_rate = 1;
  bool staircase = false;  ///< whole intervals only
  bool operator==(const LrRangeTest&) const = default;
};

/// Loshchilov and Hutter, arXiv:1608.03983, without restarts: half cosines between the base rate and eta_min,
/// t_max steps each. The closed form of torch.optim.lr_scheduler.CosineAnnealingLR; torch's steps of one
/// factor each differ from it by their rounding.
struct CosineAnnealingLr {
  std::int64_t t_max = 1;
  double eta_min = 0;
  bool operator==(const CosineAnnealingLr&) const = default;
};

using LrSchedule = std::variant<ConstantLr, WarmupLr, WarmupDecayLr, WarmupCosineLr, OneCycleLr, LrRangeTest,
                                CosineAnnealingLr>;

/// A parameter group.
struct ScheduledGroup {
  double base_lr = 0;     ///< the rate that the optimizer was created with
  std::size_t index = 0;  ///< its place in the lists of the schedule
};

}  // namespace rz
