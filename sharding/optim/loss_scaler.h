#pragma once
/// Dynamic loss scaling, which keeps small gradients in the range of f16 (Micikevicius et al.,
/// arXiv:1710.03740). The factor falls when gradients overflow and grows after a number of updates without
/// overflow, by the rule of DeepSpeed's DynamicLossScaler or of PyTorch's GradScaler.

#include <cstdint>

namespace rz {

enum class LossScaleRule {
  /// Halves after `hysteresis` overflows, doubles after each `window` updates without overflow.
  deepspeed,
  /// Multiplies by `backoff` at each overflow, by `growth` after each `growth_interval` updates without
  /// overflow. Has no minimum.
  grad_scaler
};

/// Keys and defaults of the "fp16" section of DeepSpeed, and of GradScaler.
struct LossScaleOptions {
  double fixed = 0;                     ///< loss_scale: constant factor; 0: dynamic
  int initial_power = 16;               ///< the initial factor is 2 to this power
  std::int64_t window = 1000;           ///< updates without overflow before the factor is doubled
  int hysteresis = 2;                   ///< overflows before the factor is halved
  bool consecutive_hysteresis = false;  ///< an update without overflow resets the hysteresis count
  double minimum = 1;
  LossScaleRule rule = LossScaleRule::deepspeed;
  double growth = 2, backoff = 0.5;
  std::int64_t growth_interval = 2000;
  bool operator==(const LossScaleOptions&) const = default;
};

/// Deterministic state machine: equal on all ranks if update() gets equal arguments. Not thread-safe.
class LossScaler {
 public:
  /// Errc::invalid_argument names an option that is out of range.
  explicit LossScaler(const LossScaleOptions& = {});

  /// The factor for the next update.
  double scale() const { return state_.scale; }
  /// Number of updates that were skipped.
  std::int64_t skipped() const { return state_.skipped; }
  /// Call at the end of an update. `overflow`: the update was skipped. Errc::diverged if the factor would
  /// fall below its minimum.
  void update(bool overflow);

  /// All that changes, for checkpoints.
  struct State {
    double scale = 1;
    int hysteresis_left = 0;          ///< overflows before the next halving
    std::int64_t updates = 0;         ///< skipped ones too
    std::int64_t last_overflow = -1;  ///< number of the last update that overflowed
    std::int64_t growth_tracker = 0;  ///< updates without overflow since the last change (grad_scaler)
    std::int64_t skipped = 0;
    bool operator==(const State&) const = default;
  };
  const State& state() const { return state_; }
  void set_state(const State& s) { state_ = s; }

 private:
  void overflow_as_deepspeed();
  void grow_as_deepspeed();
  void update_as_grad_scaler(bool overflow);

  LossScaleOptions options_;
  State state_;
};

}  // namespace rz
