#pragma once
/// Losses for distillation and for users' models, forward and backward, with the rules of tensor/ops.h. A
/// forward writes losses[N] in f32, one per row; sums (f64, [2]) = {sum of the losses, number of terms}; loss
/// (a scalar, f32) = the sum. The backward of all multiplies by d_loss, a scalar in f32 on the device of the
/// logits, and stores d_logits, which may be the logits themselves. Rows of logits and targets may have a row
/// stride.
///
/// N rows (all leading dimensions), V classes.

#include <cstdint>

#include "ops.h"

namespace rz::ops {

/// How far p = softmax(logits / temperature) is from a distribution q of each row.
struct SoftLoss {
  /// q itself, or softmax(targets / temperature).
  enum Targets { probabilities, logits } targets = probabilities;
  /// Σ q (log q - log p), the Kullback-Leibler divergence, instead of -Σ q log p, the cross entropy. Both
  /// have the same gradient.
  bool divergence = true;
  float temperature = 1;
  float weight = 1;  ///< multiplies the loss; temperature² keeps the gradient's size (Hinton, 1503.02531)
};
/// Every row is a term. Also writes statistics[N, 2] in f32 for backward. Targets have the dtype of the
/// logits or f32; those that are probabilities need not sum to 1, and get no gradient.
void soft_loss(const Tensor& loss, const Tensor& sums, const Tensor& losses, const Tensor& statistics,
               const Tensor& logits, const Tensor& targets, const SoftLoss&, const Stream&);
void soft_loss_backward(const Tensor& d_logits, const Tensor& logits, const Tensor& targets,
                        const Tensor& statistics, const Tensor& d_loss, const SoftLoss&, const Stream&);

/// Cross entropy of targets (i32, [N]) with label smoothing: -(1 - s) log p[target] - s / V Σ log p. Rows
/// whose target is `ignore_index` are no terms.
struct LabelLoss {
  float label_smoothing = 0;  ///< s, from 0 to below 1
  std::int32_t ignore_index = -100;
};
/// Writes log_sum[N] in f32 for backward. Targets out of range as in cross_entropy().
void label_loss(const Tensor& loss, const Tensor& sums, const Tensor& losses, const Tensor& log_sum,
                const Tensor& logits, const Tensor& targets, const LabelLoss&, const Stream&);
void label_loss_backward(const Tensor& d_logits, const Tensor& logits, const Tensor& log_sum,
                         const Tensor& targets, const Tensor& d_loss, const LabelLoss&, const Stream&);

/// counts (f64, [2]) = {rows whose largest logit is that of the target, rows whose target is not
/// ignore_index}. Of equal logits the first counts; a row with NaN is wrong.
void accuracy(const Tensor& counts, const Tensor& logits, const Tensor& targets, std::int32_t ignore_index,
              const Stream&);

/// Terms are the elements: `losses` has none of them and may be undefined in these.
enum class ElementLoss {
  squared_error,        ///< (x - y)²
  binary_cross_entropy  ///< -y log σ(x) - (1 - y) log(1 - σ(x)) of logits x
};
void element_loss(const Tensor& loss, const Tensor& sums, const Tensor& x, const Tensor& y, ElementLoss,
                  const Stream&);
/// d_x follows Into.
void element_loss_backward(const Tensor& d_x, const Tensor& d_loss, const Tensor& x, const Tensor& y,
                           ElementLoss, Into, const Stream&);

// ---- losses of losses, from their sums
/// A loss whose mean is the sum of the means of a and b, with the terms of a: sums = {a₀ + r b₀, a₁} with r =
/// a₁ / b₁, or 0 if b has no terms. ratio (a scalar, f32) = r is what d_loss is multiplied by for b.
void add_losses(const Tensor& loss, const Tensor& sums, const Tensor& ratio, const Tensor& a_sums,
                const Tensor& b_sums, const Stream&);
/// A loss whose mean is that of a, plus a scalar b in f32: sums = {a₀ + a₁ b, a₁}. terms (a scalar, f32) = a₁
/// is what d_loss is multiplied by for b.
void add_scalar(const Tensor& loss, const Tensor& sums, const Tensor& terms, const Tensor& a_sums,
                const Tensor& b, const Stream&);
/// sums = {factor · a₀, a₁}
void scale_loss(const Tensor& loss, const Tensor& sums, const Tensor& a_sums, double factor, const Stream&);

}  // namespace rz::ops
