#pragma once
/// Dynamic loss scaling, which keeps small gradients in the range of f16 (Micikevicius et al.,
/// arXiv:1710.03740). The factor is halved when gradients overflow and doubled after a window without
/// overflow, as in DeepSpeed.

#include <cstdint>

namespace rz {

/// Keys and defaults of the "fp16" section of DeepSpeed.
struct LossScaleOptions {
  double fixed = 0;                     ///< loss_scale: constant factor; 0: dynamic
  int initial_power = 16;               ///< the initial factor is 2 to this power
  std::int64_t window = 1000;           ///< updates without overflow before the factor is doubled
  int hysteresis = 2;                   ///< overflows before the factor is halved
  bool consecutive_hysteresis = false;  ///< an update without overflow resets the hysteresis count
  double minimum = 1;
};

/// Deterministic state machine: equal on all ranks if update() gets equal arguments.
class LossScaler {
 public:
  explicit LossScaler(const LossScaleOptions& = {});

  /// The factor for the next update.
  double scale() const { return scale_; }
  /// Call at the end of an update. `overflow`: the update was skipped. Errc::unsupported if the factor would
  /// fall below its minimum, which means that training has diverged.
  void update(bool overflow);

 private:
  LossScaleOptions options_;
  double scale_;
  int hysteresis_left_;  // overflows before the next halving
  std::int64_t updates_ = 0, last_overflow_ = -1;
};

}  // namespace rz
