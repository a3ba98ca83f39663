#pragma once
/// The operators of a GPT-2-class model and of small nets, forward and backward, on contiguous tensors: f32
/// on the host; f32, f16 or bf16 on a CUDA device, which the stream must belong to
/// (tensor/kernels/device_ops.h). Outputs are given by the caller and checked; a mismatch is
/// Errc::invalid_argument that names the operator and the shapes. Every result is a pure function of its
/// inputs and of stream.threads(): sums run in a fixed order. On a device the host is never waited for.
///
/// `Into::overwrite` stores a gradient, `Into::accumulate` adds it to what is there.
///
/// Shapes: N rows (any leading extents, taken together), C channels, B batch, T tokens, H heads, V
/// vocabulary.

#include <cstdint>

#include "comm/device/stream.h"
#include "tensor/tensor.h"

namespace rz::ops {

enum class Into : bool { overwrite, accumulate };
/// [in, out] as in GPT-2's checkpoints, or [out, in] as in PyTorch's Linear and tied embeddings.
enum class WeightLayout : bool { in_out, out_in };

// ---- element-wise
void fill(const Tensor& out, float value, const Stream&);
void copy(const Tensor& out, const Tensor& in, const Stream&);
void add(const Tensor& out, const Tensor& a, const Tensor& b, const Stream&);       ///< out may be a or b
void multiply(const Tensor& out, const Tensor& a, const Tensor& b, const Stream&);  ///< out may be a or b
/// out += factor · in
void add_scaled(const Tensor& out, const Tensor& in, float factor, const Stream&);
void scale(const Tensor& out, const Tensor& in, float factor, const Stream&);

/// GELU, tanh approximation (Hendrycks and Gimpel, arXiv:1606.08415; "gelu_new").
void gelu(const Tensor& out, const Tensor& in, const Stream&);
void gelu_backward(const Tensor& d_in, const Tensor& d_out, const Tensor& in, Into, const Stream&);
void relu(const Tensor& out, const Tensor& in, const Stream&);
void relu_backward(const Tensor& d_in, const Tensor& d_out, const Tensor& in, Into, const Stream&);
void tanh(const Tensor& out, const Tensor& in, const Stream&);
void tanh_backward(const Tensor& d_in, const Tensor& d_out, const Tensor& out, Into, const Stream&);

/// Keeps an element with probability 1 - p, scaled by 1/(1 - p). The decision for element i is a pure
/// function of (seed, offset + i): Philox4x32-10 (Salmon et al., 2011, doi:10.1145/2063384.2063405).
struct DropoutMask {
  float p = 0;
  std::uint64_t seed = 0, offset = 0;
  /// If given, the seed is what this says when the kernel runs, so that a captured graph draws anew: memory
  /// of the operands' device.
  const std::uint64_t* seed_at = nullptr;
};
/// Backward is the same call on d_out.
void dropout(const Tensor& out, const Tensor& in, const DropoutMask&, const Stream&);

// ---- linear
/// out[N, O] = x[N, I] · W (+ bias[O]); bias may be undefined.
void linear(const Tensor& out, const Tensor& x, const Tensor& weight, const Tensor& bias, WeightLayout,
            const Stream&);
/// Each of d_x, d_weight, d_bias may be undefined and is then not computed. d_weight and d_bias follow
/// `into`.
void linear_backward(const Tensor& d_x, const Tensor& d_weight, const Tensor& d_bias, const Tensor& d_out,
                     const Tensor& x, const Tensor& weight, WeightLayout, Into into_x, Into into_parameters,
                     const Stream&);
/// pre[N, O] = x[N, I] · W (+ bias[O]) and out = gelu(pre); pre is kept for backward.
void linear_gelu(const Tensor& out, const Tensor& pre, const Tensor& x, const Tensor& weight,
                 const Tensor& bias, WeightLayout, const Stream&);
/// The d_x of a linear layer whose input was x = gelu(pre), taken on to pre: d_pre[N, I] = (d_out[N, O] · Wᵀ)
/// · gelu'(pre[N, I]).
void linear_backward_through_gelu(const Tensor& d_pre, const Tensor& d_out, const Tensor& weight,
                                  const Tensor& pre, WeightLayout, const Stream&);
/// out[M, N] = a · b, each optionally transposed.
void matmul(const Tensor& out, const Tensor& a, bool transpose_a, const Tensor& b, bool transpose_b, Into,
            const Stream&);

// ---- layer norm (Ba et al., arXiv:1607.06450)
/// mean[N] and inverse_deviation[N] are kept for backward.
void layer_norm(const Tensor& out, const Tensor& mean, const Tensor& inverse_deviation, const Tensor& x,
                const Tensor& weight, const Tensor& bias, float epsilon, const Stream&);
/// sum = a + b, then layer norm of it: the residual and the norm in one pass over memory.
void add_layer_norm(const Tensor& sum, const Tensor& out, const Tensor& mean, const Tensor& inverse_deviation,
                    const Tensor& a, const Tensor& b, const Tensor& weight, const Tensor& bias, float epsilon,
                    const Stream&);
/// d_weight and d_bias may be undefined. d_x follows into_x.
void layer_norm_backward(const Tensor& d_x, const Tensor& d_weight, const Tensor& d_bias, const Tensor& d_out,
                         const Tensor& x, const Tensor& weight, const Tensor& mean,
                         const Tensor& inverse_deviation, Into into_x, Into into_parameters, const Stream&);

// ---- attention
/// Causal self-attention with scale 1/sqrt(C/H): qkv[B, T, 3C] → out[B, T, C]; log_sum[B, H, T] is kept for
/// backward (the probabilities are not). The mask drops probabilities: that of key j for query i of head h in
/// sequence b is its element ((b · H + h) · T + i) · T + j.
void causal_attention(const Tensor& out, const Tensor& log_sum, const Tensor& qkv, int heads,
                      const DropoutMask&, const Stream&);
void causal_attention_backward(const Tensor& d_qkv, const Tensor& d_out, const Tensor& out,
                               const Tensor& log_sum, const Tensor& qkv, int heads, const DropoutMask&,
                               const Stream&);

// ---- embedding
/// out[N, C] = table[tokens[n]]; tokens are i32. Errc::invalid_argument names the first token that is out of
/// range; on a device, where the host cannot look, its row becomes NaN, and its gradient goes nowhere.
void embedding(const Tensor& out, const Tensor& tokens, const Tensor& table, const Stream&);
/// out[B, T, C] = tokens' rows + positions' rows t = 0 … T-1.
void embedding_with_positions(const Tensor& out, const Tensor& tokens, const Tensor& table,
                              const Tensor& positions, const Stream&);
void embedding_backward(const Tensor& d_table, const Tensor& d_out, const Tensor& tokens, Into,
                        const Stream&);
/// d_positions[T, C] (rows beyond T untouched, or zeroed with `overwrite`) from d_out[B, T, C].
void positions_backward(const Tensor& d_positions, const Tensor& d_out, Into, const Stream&);

// ---- losses
/// out = softmax over the last extent.
void softmax(const Tensor& out, const Tensor& in, const Stream&);
void softmax_backward(const Tensor& d_in, const Tensor& d_out, const Tensor& out, Into, const Stream&);
struct LossSum {
  double sum = 0;
  std::size_t count = 0;
};
/// Negative log-likelihood of targets (i32, [N]; -100 is ignored) under softmax(logits[N, V]): losses[N] and
/// log_sum[N] in f32; sums (f64, [2]) = {their sum, made in double; rows not ignored}; loss (a scalar) = the
/// mean over these rows, 0 if there are none. On a device a target out of range makes loss and gradient NaN.
void cross_entropy(const Tensor& loss, const Tensor& sums, const Tensor& losses, const Tensor& log_sum,
                   const Tensor& logits, const Tensor& targets, const Stream&);
/// d_logits = (softmax(logits) - onehot) · d_loss / rows not ignored; d_logits may be logits itself.
void cross_entropy_backward(const Tensor& d_logits, const Tensor& logits, const Tensor& log_sum,
                            const Tensor& targets, const Tensor& d_loss, const Tensor& sums, const Stream&);
/// loss (a scalar) = the mean of (a - b)², summed in double.
void mean_squared_error(const Tensor& loss, const Tensor& a, const Tensor& b, const Stream&);
/// d_a = 2 (a - b) · d_loss / count
void mean_squared_error_backward(const Tensor& d_a, const Tensor& d_loss, const Tensor& a, const Tensor& b,
                                 Into, const Stream&);

}  // namespace rz::ops
