#pragma once
/// The operators of tensor/ops.h on a tape: each runs forward and records its backward. Shapes are those of
/// tensor/ops.h; a mismatch is Errc::invalid_argument. A default Var means "no bias".
///
/// With Tape::autocast(), as with torch.autocast: linear, linear_gelu, matmul and attention cast their
/// inputs to its dtype; layer_norm, rms_norm, those with a sum, and losses cast theirs to f32, as does a part
/// of autograd_lite/element_ops.h. All others compute in the dtype of their inputs. A parameter is cast once
/// in each scope, and again in backward where its memory is released in between.

#include <cstddef>
#include <utility>

#include "../tensor/ops.h"
#include "attention_ops.h"
#include "element_ops.h"
#include "shape_ops.h"
#include "tape.h"

namespace rz::nn {

using ops::WeightLayout;

/// What a rank has of a dimension of `of` indices; of = 0: all of it.
struct PartOf {
  Range own{};
  std::size_t of = 0;
};

// ---- element-wise; others in autograd_lite/element_ops.h
Var gelu(Tape&, Var x);  ///< tanh approximation
/// silu(gate) · up, with the bits of both operators; it keeps neither result. The shapes are equal.
Var swiglu(Tape&, Var gate, Var up);
/// Consumes a range of the tape's random numbers. Returns x itself if p is 0. If x is a part of a tensor
/// that is divided along this dimension, which counts from the last, the mask is its part of the tensor's.
Var dropout(Tape&, Var x, float p, PartOf part = {}, int dimension = -1);

// ---- linear
/// x[…, in] → […, out]
Var linear(Tape&, Var x, Var weight, Var bias, WeightLayout);
/// linear() without a bias, for logits: on a device the rows of the result begin at multiples of 128 bytes
/// (Tensor::row_stride), without which products with 50257 columns are slow. linear, matmul, softmax,
/// cross_entropy, add, sub, mul, cast and contiguous() read such rows; other operators refuse them.
Var linear_aligned(Tape&, Var x, Var weight, WeightLayout);
/// gelu(pre). Only `pre` is on the tape: an operator that reads `value` must propagate its gradient to `pre`.
struct Activation {
  Var pre;
  Tensor value;
};
/// A linear layer followed by a GELU (tanh approximation) as one operator, and the linear layer that reads
/// the result. The backward of the latter includes the GELU's, so that devices need no separate GELU kernel.
Activation linear_gelu(Tape&, Var x, Var weight, Var bias, WeightLayout);
Var linear(Tape&, const Activation& x, Var weight, Var bias, WeightLayout);
/// The value of an activation on the tape, for operators that do not know its GELU.
Var activated(Tape&, const Activation&);
/// A linear layer with a low-rank update: x · W + bias + scale · (x' · Aᵀ) · Bᵀ, where x' is x, or its
/// dropout, A is [r, in] and B [out, r].
struct LowRank {
  Var x, a, b;
  float scale = 1;
};
Var linear_low_rank(Tape&, Var x, Var weight, Var bias, WeightLayout, LowRank);
/// a[…, M, K] · b[…, K, N] → […, M, N], each optionally transposed in its last two extents. The leading
/// extents are equal, or a factor has none and is the same in all products.
Var matmul(Tape&, Var a, bool transpose_a, Var b, bool transpose_b);

// ---- norms, over the last dimension
Var layer_norm(Tape&, Var x, Var weight, Var bias, float epsilon);
struct SumAndNorm {
  Var sum, norm;
};
/// sum = a + b and its layer norm, in one pass over memory.
SumAndNorm add_layer_norm(Tape&, Var a, Var b, Var weight, Var bias, float epsilon);
/// x / √(mean(x²) + epsilon) · weight
Var rms_norm(Tape&, Var x, Var weight, float epsilon);
/// sum = a + b and its RMS norm, in one pass over memory.
SumAndNorm add_rms_norm(Tape&, Var a, Var b, Var weight, float epsilon);

// ---- embedding; attention in autograd_lite/attention_ops.h
/// tokens: i32 [any shape] → [that shape, C]
Var embedding(Tape&, const Tensor& tokens, Var table);
/// tokens: i32 [B, T] → [B, T, C]; row t of `positions` is added to token t of every sequence.
Var embedding_with_positions(Tape&, const Tensor& tokens, Var table, Var positions);

// ---- losses
/// The loss of a micro-batch, a mean: a sum and the number of its terms, or any scalar of the tape, such as
/// nn::mean(), which has no terms. The loss of an update is the ratio of the sums and numbers of terms of its
/// micro-batches and ranks; a mean of means, as scalars have, would weigh the terms of short batches more.
/// Strategy::backward() computes the gradient of that ratio. Alone, Tape::backward(loss.sum, 1 / expected).
struct Loss {
  Var sum;           ///< or the scalar
  Tensor sum_count;  ///< f64, on the device of the logits: {sum, number of terms}; undefined for a scalar

  Loss() = default;
  Loss(Var scalar) : sum(scalar) {}  // NOLINT: implicit by design
  Loss(Var s, Tensor of_terms) : sum(s), sum_count(std::move(of_terms)) {}
  bool has_terms() const { return sum_count.defined(); }
  /// Copies `sum_count`, or the scalar as one term, to the host. On a device it synchronizes the stream.
  /// Errc::invalid_argument for a tensor that is no scalar.
  ops::LossSum read(const Stream&) const;

  /// The loss of a micro-batch whose mean is the sum of the means of `a` and `b`; it has the terms of `a`, or
  /// those of `b` if `a` is a scalar, such as a regulariser. A student's loss, with targets that label each
  /// row of the teacher's logits:
  ///
  ///     nn::Loss loss = 0.3 * nn::cross_entropy(tape, logits, labels) + 0.7 * nn::kl_div(tape, logits,
  ///     teacher, how);
  ///
  /// An update's loss is then the sum of the means over all micro-batches and ranks if the ratio of the two
  /// numbers of terms is the same in all of them: both count the same targets, or rows and their elements. If
  /// it differs, e.g. because only `a` ignores targets, the mean of `b` in a micro-batch weighs as much as
  /// the terms of `a` in it. A loss whose number of terms is 0 adds 0. The host does not wait for a device.
  /// Errc::invalid_argument if the losses are not of one tape, and for a tensor that is no scalar.
  friend Loss operator+(const Loss& a, const Loss& b);
  /// A loss whose mean is multiplied. Errc::invalid_argument if the factor is not finite.
  friend Loss operator*(double factor, const Loss&);
  friend Loss operator*(const Loss& a, double factor) { return factor * a; }
};
/// Negative log-likelihood, summed over the rows whose target (i32) is not -100, which are the terms.
Loss cross_entropy(Tape&, Var logits, const Tensor& targets);
/// Mean squared difference.
Var mse(Tape&, Var prediction, const Tensor& target);

}  // namespace rz::nn
