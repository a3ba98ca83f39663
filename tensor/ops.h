#pragma once
/// Operators of GPT-2-class models and small networks, forward and backward, on tensors of f32, f16 or bf16,
/// on the host or on a CUDA device, in a stream of that device. The tensors of a call have one dtype, except
/// statistics (mean, inverse_deviation, inverse_rms, log_sum, losses: f32) and gradients of parameters, which
/// may be f32 next to 16-bit values. Arithmetic is in f32 or wider; a 16-bit result is rounded once, to
/// nearest; cuBLASLt may round a product once more before it adds it to a 16-bit result. The caller allocates
/// the outputs. A mismatch of shapes, dtypes or devices is Errc::invalid_argument, which names the operator
/// and the shapes. Results are pure functions of the inputs and of stream.threads(): sums run in a fixed
/// order. On a device the operators only enqueue work and never block the host. Tensors are contiguous; only
/// fill, copy, binary, add_scaled, scale, linear, linear_backward, matmul, softmax, log_softmax and
/// cross_entropy accept a row stride (Tensor::row_stride).
///
/// `Into::overwrite` stores a gradient; `Into::accumulate` adds it to the existing value.
///
/// Dimensions: N rows (all leading dimensions), C channels, B batch, T tokens, H heads, V vocabulary, I
/// inputs, O outputs.

#include <cstdint>
#include <limits>

#include "../comm/device/stream.h"
#include "element_ops.h"
#include "tensor.h"

namespace rz::ops {

/// [in, out] as in GPT-2's checkpoints, or [out, in] as in PyTorch's Linear and tied embeddings.
enum class WeightLayout : bool { in_out, out_in };

// ---- element-wise; others in tensor/element_ops.h
void fill(const Tensor& out, float value, const Stream&);
void copy(const Tensor& out, const Tensor& in, const Stream&);  ///< converts between dtypes
/// out += factor · in
void add_scaled(const Tensor& out, const Tensor& in, float factor, const Stream&);
void scale(const Tensor& out, const Tensor& in, float factor, const Stream&);

/// GELU, tanh approximation (Hendrycks and Gimpel, arXiv:1606.08415; "gelu_new").
void gelu(const Tensor& out, const Tensor& in, const Stream&);
/// NaN at ±infinity, as in PyTorch.
void gelu_backward(const Tensor& d_in, const Tensor& d_out, const Tensor& in, Into, const Stream&);

/// out = silu(gate) · up (Shazeer 2020, arXiv:2002.05202), with the bits of unary(silu) and a product.
void swiglu(const Tensor& out, const Tensor& gate, const Tensor& up, const Stream&);
/// Both gradients; either may be undefined.
void swiglu_backward(const Tensor& d_gate, const Tensor& d_up, const Tensor& d_out, const Tensor& gate,
                     const Tensor& up, Into into_gate, Into into_up, const Stream&);

/// Dropout: keeps an element with probability 1 - p, scaled by 1/(1 - p). The decision for element i is a
/// pure function of (seed, offset + i): Philox4x32-10 (Salmon et al., 2011, doi:10.1145/2063384.2063405).
struct DropoutMask {
  float p = 0;
  std::uint64_t seed = 0, offset = 0;
  /// If not null, the kernel reads the seed here, in memory of the operands' device, when it runs. A captured
  /// graph can thus use a new seed in each run.
  const std::uint64_t* seed_at = nullptr;
  /// The tensor is a part of another one: `run` consecutive elements of each `stride`, as a rank's heads or
  /// columns: element i uses decision offset + i / run · stride + i % run. 0: offset + i.
  std::uint64_t run = 0, stride = 0;
};
/// The backward is the same call on d_out.
void dropout(const Tensor& out, const Tensor& in, const DropoutMask&, const Stream&);

// ---- linear
/// out[N, O] = x[N, I] · W (+ bias[O]); bias may be undefined.
void linear(const Tensor& out, const Tensor& x, const Tensor& weight, const Tensor& bias, WeightLayout,
            const Stream&);
/// d_x, d_weight and d_bias are each optional: an undefined one is not computed. d_x follows into_x, d_weight
/// and d_bias follow into_parameters.
void linear_backward(const Tensor& d_x, const Tensor& d_weight, const Tensor& d_bias, const Tensor& d_out,
                     const Tensor& x, const Tensor& weight, WeightLayout, Into into_x, Into into_parameters,
                     const Stream&);
/// pre[N, O] = x[N, I] · W (+ bias[O]) and out = gelu(pre). Backward needs pre.
void linear_gelu(const Tensor& out, const Tensor& pre, const Tensor& x, const Tensor& weight,
                 const Tensor& bias, WeightLayout, const Stream&);
/// Backward of a linear layer whose input was gelu(pre), with respect to pre: d_pre[N, I] = (d_out[N, O] ·
/// Wᵀ) · gelu'(pre[N, I]).
void linear_backward_through_gelu(const Tensor& d_pre, const Tensor& d_out, const Tensor& weight,
                                  const Tensor& pre, WeightLayout, const Stream&);
/// out[M, N] = a · b, each optionally transposed, or such products of out[…, M, N]: leading extents of a
/// factor are those of out, or it has none and is the same in all products.
void matmul(const Tensor& out, const Tensor& a, bool transpose_a, const Tensor& b, bool transpose_b, Into,
            const Stream&);

// ---- norms of matrices, in f32
/// out = in / (|in| + epsilon), where |in|² is the sum over all elements, in double. out may be in.
void normalize(const Tensor& out, const Tensor& in, float epsilon, const Stream&);
/// Modified Gram-Schmidt on the columns of a matrix, in place: each is divided by its length + epsilon, so
/// that one that depends on those before it becomes small. Sums in double. For few columns.
void orthogonalize_columns(const Tensor& in_out, float epsilon, const Stream&);

// ---- layer norm (Ba et al., arXiv:1607.06450)
/// Also writes mean[N] and inverse_deviation[N] for backward.
void layer_norm(const Tensor& out, const Tensor& mean, const Tensor& inverse_deviation, const Tensor& x,
                const Tensor& weight, const Tensor& bias, float epsilon, const Stream&);
/// sum = a + b and out = layer norm of sum, in one pass over memory.
void add_layer_norm(const Tensor& sum, const Tensor& out, const Tensor& mean, const Tensor& inverse_deviation,
                    const Tensor& a, const Tensor& b, const Tensor& weight, const Tensor& bias, float epsilon,
                    const Stream&);
/// d_weight and d_bias are optional. d_x follows into_x.
void layer_norm_backward(const Tensor& d_x, const Tensor& d_weight, const Tensor& d_bias, const Tensor& d_out,
                         const Tensor& x, const Tensor& weight, const Tensor& mean,
                         const Tensor& inverse_deviation, Into into_x, Into into_parameters, const Stream&);

// ---- RMS norm (Zhang and Sennrich, arXiv:1910.07467)
/// out = x / √(mean(x²) + epsilon) · weight, over the last dimension; also writes inverse_rms[N] = 1 /
/// √(mean(x²) + epsilon) for backward.
void rms_norm(const Tensor& out, const Tensor& inverse_rms, const Tensor& x, const Tensor& weight,
              float epsilon, const Stream&);
/// sum = a + b and out = RMS norm of sum, in one pass over memory.
void add_rms_norm(const Tensor& sum, const Tensor& out, const Tensor& inverse_rms, const Tensor& a,
                  const Tensor& b, const Tensor& weight, float epsilon, const Stream&);
/// d_weight is optional. d_x follows into_x; it may be d_out.
void rms_norm_backward(const Tensor& d_x, const Tensor& d_weight, const Tensor& d_out, const Tensor& x,
                       const Tensor& weight, const Tensor& inverse_rms, Into into_x, Into into_weight,
                       const Stream&);

// ---- tensors whose rows the ranks divide
/// An index, of local_indices(), of an element that another rank has.
constexpr std::int32_t elsewhere = std::numeric_limits<std::int32_t>::min();
/// Indices (i32) of `total` elements as those of the elements [first, first + count): less `first`, or
/// `elsewhere`. Those outside [0, total), such as -100, stay as they are.
void local_indices(const Tensor& out, const Tensor& in, std::size_t first, std::size_t count,
                   std::size_t total, const Stream&);

// ---- embedding
/// out[N, C] = table[tokens[n]]; tokens are i32. On the host, Errc::invalid_argument names the first token
/// out of range. On a device, the row of such a token becomes NaN, and its gradient is dropped. The row of
/// `elsewhere` is 0 and has no gradient.
void embedding(const Tensor& out, const Tensor& tokens, const Tensor& table, const Stream&);
/// out[B, T, C] = table[tokens[b, t]] + positions[t]
void embedding_with_positions(const Tensor& out, const Tensor& tokens, const Tensor& table,
                              const Tensor& positions, const Stream&);
void embedding_backward(const Tensor& d_table, const Tensor& d_out, const Tensor& tokens, Into,
                        const Stream&);
/// d_positions[T, C] from d_out[B, T, C]. Rows beyond T are unchanged, or zeroed with Into::overwrite.
void positions_backward(const Tensor& d_positions, const Tensor& d_out, Into, const Stream&);

// ---- losses
/// out = softmax over the last dimension.
void softmax(const Tensor& out, const Tensor& in, const Stream&);
void softmax_backward(const Tensor& d_in, const Tensor& d_out, const Tensor& out, Into, const Stream&);
struct LossSum {
  double sum = 0;
  std::size_t count = 0;
};
/// Negative log-likelihood of targets (i32, [N]; -100 is ignored) under softmax(logits[N, V]). Writes
/// losses[N] and log_sum[N] in f32; sums (f64, [2]) = {sum of the losses, number of rows not ignored}; loss
/// (a scalar) = the sum. On a device, a target out of range makes loss and gradient NaN.
void cross_entropy(const Tensor& loss, const Tensor& sums, const Tensor& losses, const Tensor& log_sum,
                   const Tensor& logits, const Tensor& targets, const Stream&);
/// d_logits = (softmax(logits) - onehot) · d_loss, 0 in ignored rows. d_logits may be logits itself. The
/// target `elsewhere` is none of these logits.
void cross_entropy_backward(const Tensor& d_logits, const Tensor& logits, const Tensor& log_sum,
                            const Tensor& targets, const Tensor& d_loss, const Stream&);
/// What a rank knows of a cross entropy if it has logits[N, V] of a part of the classes: statistics[N, 2]
/// (f32) = {log Σ e^logit, the target's logit, 0 if it is `elsewhere` or ignored}. Targets: local_indices().
void cross_entropy_part(const Tensor& statistics, const Tensor& logits, const Tensor& targets, const Stream&);
/// cross_entropy() from the statistics[P, N, 2] of all P parts, which are added in their order, in double.
/// Only ignored targets are read, so that all ranks may use their own. cross_entropy_backward() with this
/// log_sum is the gradient of a part.
void cross_entropy_of_parts(const Tensor& loss, const Tensor& sums, const Tensor& losses,
                            const Tensor& log_sum, const Tensor& statistics, const Tensor& targets,
                            const Stream&);
/// loss (a scalar) = mean of (a - b)², summed in double.
void mean_squared_error(const Tensor& loss, const Tensor& a, const Tensor& b, const Stream&);
/// d_a = 2 (a - b) · d_loss / count
void mean_squared_error_backward(const Tensor& d_a, const Tensor& d_loss, const Tensor& a, const Tensor& b,
                                 Into, const Stream&);

}  // namespace rz::ops
