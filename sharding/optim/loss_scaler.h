#pragma once
/// The factor that keeps small gradients in f16's range (Micikevicius et al., arXiv:1710.03740): halved when
/// gradients overflow, doubled when they have not for a while, as DeepSpeed does.

#include <cstdint>

namespace rz {

/// Keys and defaults of DeepSpeed's "fp16".
struct LossScaleOptions {
  double fixed = 0;                     ///< loss_scale: never changed; 0: as follows
  int initial_power = 16;               ///< the first factor is 2 to this
  std::int64_t window = 1000;           ///< updates without an overflow before the factor is doubled
  int hysteresis = 2;                   ///< overflows before it is halved
  bool consecutive_hysteresis = false;  ///< an update without an overflow starts that count anew
  double minimum = 1;
};

/// A state machine that is the same on every rank if it is told the same.
class LossScaler {
 public:
  explicit LossScaler(const LossScaleOptions& = {});

  double scale() const { return scale_; }
  /// An update has ended; with `overflow` it was left out. Errc::unsupported if the factor would have to go
  /// below its minimum: training has diverged.
  void update(bool overflow);

 private:
  LossScaleOptions options_;
  double scale_;
  int hysteresis_left_;  // overflows before the next halving
  std::int64_t updates_ = 0, last_overflow_ = -1;
};

}  // namespace rz
