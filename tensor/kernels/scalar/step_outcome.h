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
  double expected_terms = 1;   ///< gradients are sums over terms of the loss, divided by this number
  bool operator==(const StepLimits&) const = default;
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

/// In place of the number of terms of a loss.
inline constexpr double uncounted_terms = -1;

/// Factor that makes gradients means over `terms`; 1 if they were not counted, and for a loss without terms,
/// whose gradients are 0.
RZ_HOST_DEVICE inline double term_factor(double terms, const StepLimits& limits) {
  return terms > 0 ? limits.expected_terms / terms : 1;
}

/// From the sum of the squares of all gradients, and the number of terms of their loss. Without a term there
/// is nothing to learn from: the update is skipped.
RZ_HOST_DEVICE inline StepOutcome step_outcome(double sum_of_squares, double terms,
                                               const StepLimits& limits) {
  StepOutcome out;
  const double factor = term_factor(terms, limits);
  out.norm = std::sqrt(sum_of_squares) * factor / limits.loss_scale;
  const double clip = limits.max_norm > 0 ? clip_factor(out.norm, limits.max_norm) : 1;
  out.grad_scale = static_cast<float>(clip * factor / limits.loss_scale);
  const bool finite = out.norm - out.norm == 0;
  out.skip = (limits.skip_overflow && !finite) || terms == 0;
  return out;
}

}  // namespace rz
