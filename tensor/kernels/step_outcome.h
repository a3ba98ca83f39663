#pragma once
/// Effect of the gradient norm on an update: clipping and skipping. Same arithmetic on host and device.

#include <cmath>
#include <cstdint>

#include "comm/core/math.h"

namespace rz {

struct StepLimits {
  double max_norm = 0;         ///< clipping threshold of the norm; 0: no clipping
  double loss_scale = 1;       ///< factor in the gradients, which the update removes
  bool skip_overflow = false;  ///< skip the update if the norm is not finite
};

struct StepOutcome {
  double norm = 0;        ///< without loss scale, before clipping
  float grad_scale = 1;   ///< factor by which the update multiplies gradients
  std::int32_t skip = 0;  ///< 1: skip the update
};

/// Clipping factor of torch.nn.utils.clip_grad_norm_: max_norm / (norm + 1e-6) if that is below 1 or NaN,
/// otherwise 1.
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
