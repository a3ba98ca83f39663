#pragma once
/// One optimizer update: what the gradient norm decides on (clipping, skipping), its elements, and the
/// constants of the update rules in the form that all kernels use. Same arithmetic on host and device.

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "comm/core/math.h"
#include "comm/core/types.h"

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

namespace rz::kernels {

/// `count` elements that are updated with one rule.
struct UpdateRun {
  float* value = nullptr;
  const void* gradient = nullptr;
  DType gradient_dtype = DType::f32;  ///< f32, f16 or bf16
  void* working = nullptr;            ///< 16-bit copy of the new values; may be null
  DType working_dtype = DType::bf16;  ///< f16 or bf16
  float* state0 = nullptr;            ///< the first state of the rule, if it has one
  float* state1 = nullptr;            ///< the second one
  float* state2 = nullptr;            ///< the third one
  std::size_t count = 0;
  std::uint32_t rule = 0;    ///< on a device: index of the constants
  std::uint32_t member = 0;  ///< on a device: index of the parameter, for rules that need its norms
};

/// Elements [begin, end) of a run.
inline UpdateRun part_of(UpdateRun run, std::size_t begin, std::size_t end) {
  run.value += begin;
  run.gradient = static_cast<const std::byte*>(run.gradient) + begin * size_of(run.gradient_dtype);
  if (run.working) run.working = static_cast<std::byte*>(run.working) + begin * size_of(run.working_dtype);
  if (run.state0) run.state0 += begin;
  if (run.state1) run.state1 += begin;
  if (run.state2) run.state2 += begin;
  run.count = end - begin;
  return run;
}

// In all rules g is the gradient, multiplied by `scale` first; a negative scale maximizes.

/// Adam (Kingma and Ba, arXiv:1412.6980) and AdamW (Loshchilov and Hutter, arXiv:1711.05101) as in
/// torch.optim.
struct AdamStep {
  double lr = 1e-3;
  double beta1 = 0.9, beta2 = 0.999;
  float eps = 1e-8f;
  float weight_decay = 0;
  double bias_correction1 = 1;       ///< 1 - beta1^t
  double bias_correction2_sqrt = 1;  ///< √(1 - beta2^t)
  float scale = 1;
  bool decoupled = false;  ///< weight decay as in AdamW; otherwise as in Adam
};

/// p *= keep; g += l2·p; m = beta1·m + rest1·g; v = beta2·v + rest2·g²; p -= rate·m / (√v·correction + eps).
/// With a third state, the running maximum of v takes the place of v in the last step (AMSGrad: Reddi, Kale
/// and Kumar, arXiv:1904.09237). Each constant is rounded once, from double. States: m, v and, for AMSGrad,
/// the maximum.
struct AdamFactors {
  float keep, l2, beta1, rest1, beta2, rest2, rate, correction, eps, scale;
};
inline AdamFactors adam_factors(const AdamStep& s) {
  const double lr = s.lr, decay = s.weight_decay;
  return {.keep = static_cast<float>(s.decoupled ? 1 - lr * decay : 1),
          .l2 = s.decoupled ? 0 : s.weight_decay,
          .beta1 = static_cast<float>(s.beta1),
          .rest1 = static_cast<float>(1 - s.beta1),
          .beta2 = static_cast<float>(s.beta2),
          .rest2 = static_cast<float>(1 - s.beta2),
          .rate = static_cast<float>(lr / s.bias_correction1),
          .correction = static_cast<float>(1 / s.bias_correction2_sqrt),
          .eps = s.eps,
          .scale = s.scale};
}

/// g += weight_decay·p; buf = momentum·buf + rest·g; p -= lr·buf, or with nesterov p -= lr·(g +
/// momentum·buf). Without state p -= lr·g. State: buf.
struct SgdFactors {
  float lr, momentum, rest, weight_decay, scale;
  std::int32_t nesterov;
};

/// Lion (Chen et al., arXiv:2302.06675): p = keep·p - rate·sign(beta1·m + rest1·g); m = beta2·m + rest2·g.
/// The sign of 0 is 0. State: m.
struct LionFactors {
  float keep, beta1, rest1, beta2, rest2, rate, scale;
};

/// Adagrad (Duchi et al., JMLR 12, 2011) as in torch.optim: g += l2·p; s += g²; p -= rate·g / (√s + eps).
/// State: s.
struct AdagradFactors {
  float l2, rate, eps, scale;
};

/// RMSprop (Hinton, lecture 6e of "Neural Networks for Machine Learning") as in torch.optim: g += l2·p; s =
/// alpha·s + rest·g²; centered: a = alpha·a + rest·g and r = √max(s - a², 0), else r = √s; u = g / (r + eps);
/// p -= rate·u, or with momentum b = momentum·b + u and p -= rate·b. States: s; a if centered; b, which has
/// no memory without momentum.
struct RmspropFactors {
  float l2, alpha, rest, momentum, rate, eps, scale;
  std::int32_t centered;
};

/// LAMB (You et al., arXiv:1904.00962): m = beta1·m + rest1·g; v = beta2·v + rest2·g²; u = m / (√v + eps) +
/// weight_decay·p, with eps_inside_sqrt m / √(v + eps); p -= rate·trust·u. States: m, v.
struct LambFactors {
  float beta1, rest1, beta2, rest2, eps, weight_decay, rate, scale;
  float min_coeff, max_coeff;  ///< limits of the trust ratio
  std::int32_t eps_inside_sqrt;
};
/// |p| / |u| within the limits, 1 if a norm is 0, from the squared norms.
RZ_HOST_DEVICE inline float trust_ratio(const LambFactors& f, double values, double updates) {
  if (values == 0 || updates == 0) return 1;
  const auto ratio = static_cast<float>(std::sqrt(values) / std::sqrt(updates));
  return ratio > f.max_coeff ? f.max_coeff : ratio < f.min_coeff ? f.min_coeff : ratio;
}

/// Muon (Jordan et al., https://kellerjordan.github.io/posts/muon/): m = beta·m + rest·g; the direction is m,
/// or with nesterov rest·g + beta·m. State: m.
struct MuonFactors {
  float beta, rest, scale;
  std::int32_t nesterov;
};

/// p = keep·p - rate·g. No state.
struct DecayedStepFactors {
  float keep, rate, scale;
};

}  // namespace rz::kernels
