#pragma once
/// What the norm of the gradients decides of an update: one arithmetic for host and device.

#include <cmath>
#include <cstdint>

#include "comm/core/math.h"

namespace rz {

struct StepLimits {
  double max_norm = 0;         ///< gradients are scaled down to it; 0: never
  double loss_scale = 1;       ///< the factor that gradients carry, and that is taken out
  bool skip_overflow = false;  ///< a norm that is not finite leaves the update out
};

struct StepOutcome {
  double norm = 0;        ///< without the loss scale, before clipping
  float grad_scale = 1;   ///< what the update multiplies gradients by
  std::int32_t skip = 0;  ///< 1: the update is left out
};

/// Clips as torch.nn.utils.clip_grad_norm_: by max_norm / (norm + 1e-6) where that is below 1 or NaN.
RZ_HOST_DEVICE inline double clip_factor(double norm, double max_norm) {
  const double factor = max_norm / (norm + 1e-6);
  return factor < 1 || factor != factor ? factor : 1;
}

RZ_HOST_DEVICE inline StepOutcome step_outcome(double sum_of_squares, const StepLimits& limits) {
  StepOutcome out;
  out.norm = std::sqrt(sum_of_squares) / limits.loss_scale;
  const double clip = limits.max_norm > 0 ? clip_factor(out.norm, limits.max_norm) : 1;
  out.grad_scale = static_cast<float>(clip / limits.loss_scale);
  const bool finite = out.norm - out.norm == 0;
  out.skip = limits.skip_overflow && !finite;
  return out;
}

}  // namespace rz
