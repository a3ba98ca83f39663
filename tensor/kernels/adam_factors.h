#pragma once
/// The constants of an Adam step in the form that all kernels use.

#include "tensor/kernels/optimizer_step.h"

namespace rz::kernels {

/// Each constant is rounded once, from double.
struct AdamFactors {
  float keep, l2, beta1, rest1, beta2, rest2, rate, correction, eps, scale;
};

/// `decoupled`: weight decay as in AdamW; otherwise as in Adam.
inline AdamFactors factors(const AdamStep& s, bool decoupled) {
  const double lr = s.lr, decay = s.weight_decay;
  return {.keep = static_cast<float>(decoupled ? 1 - lr * decay : 1),
          .l2 = decoupled ? 0 : s.weight_decay,
          .beta1 = static_cast<float>(s.beta1),
          .rest1 = static_cast<float>(1 - s.beta1),
          .beta2 = static_cast<float>(s.beta2),
          .rest2 = static_cast<float>(1 - s.beta2),
          .rate = static_cast<float>(lr / s.bias_correction1),
          .correction = static_cast<float>(1 / s.bias_correction2_sqrt),
          .eps = s.eps,
          .scale = s.grad_scale};
}

/// The constants for elements with and without weight decay.
struct AdamRule {
  AdamFactors with_decay, without;
};
inline AdamRule adam_rule(const AdamStep& step, bool decoupled) {
  AdamStep without = step;
  without.weight_decay = 0;
  return {factors(step, decoupled), factors(without, decoupled)};
}

}  // namespace rz::kernels
