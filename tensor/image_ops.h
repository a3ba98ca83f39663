#pragma once
/// Operators of convolutional networks with PyTorch's names and semantics, forward and backward, with the
/// rules of tensor/ops.h. Images are [N, C, H, W]; tensors are contiguous. The result of a call has the same
/// bits for every number of threads.
///
/// Dimensions: N images, C channels, H rows, W columns; O output channels; P = H · W positions of a channel.

#include <cstddef>

#include "ops.h"

namespace rz::ops {

/// One number for height and width, or one for each.
struct Size2 {
  std::size_t h = 0, w = 0;
  constexpr Size2() = default;
  constexpr Size2(std::size_t both) : h(both), w(both) {}
  constexpr Size2(std::size_t h, std::size_t w) : h(h), w(w) {}
  bool operator==(const Size2&) const = default;
};

// ---- convolution
struct Conv2d {
  Size2 stride = 1, padding = 0, dilation = 1;
  std::size_t groups = 1;
};
/// The shape of conv2d(). Errc::invalid_argument names both shapes and the options if they do not fit
/// together.
Shape conv2d_shape(const Shape& x, const Shape& weight, const Conv2d&);
/// out[N, O, H', W'] of x[N, C, H, W] and weight[O, C / groups, kh, kw]; bias[O] may be undefined. Images
/// are padded with zeros. Products of 16-bit factors are summed in f32 and rounded once. On the host the
/// columns of a tile of positions are products' operands, so that memory besides the tensors does not grow
/// with N (Chellapilla et al., 2006, hal.science/inria-00112631).
void conv2d(const Tensor& out, const Tensor& x, const Tensor& weight, const Tensor& bias, const Conv2d&,
            const Stream&);
/// d_x, d_weight and d_bias are each optional: an undefined one is not computed. d_x follows into_x, d_weight
/// and d_bias follow into_parameters.
void conv2d_backward(const Tensor& d_x, const Tensor& d_weight, const Tensor& d_bias, const Tensor& d_out,
                     const Tensor& x, const Tensor& weight, const Conv2d&, Into into_x, Into into_parameters,
                     const Stream&);

// ---- pooling
struct Pool2d {
  Size2 kernel = 2;
  Size2 stride = 0;  ///< 0: that of the kernel
  Size2 padding = 0;
};
/// The shape of both kinds. Errc::invalid_argument names `op`, the shape and the options unless the padding
/// is at most half of the kernel and a window fits.
Shape pool2d_shape(const char* op, const Shape& x, const Pool2d&);
/// The largest element of each window, of which padding is no part. Of equal elements the first one counts,
/// in the order of rows, and NaN more than any number, the last one of several. indices (i32) is its position
/// h · W + w, of the shape of out.
void max_pool2d(const Tensor& out, const Tensor& indices, const Tensor& x, const Pool2d&, const Stream&);
/// Adds the gradients of windows in their order.
void max_pool2d_backward(const Tensor& d_x, const Tensor& d_out, const Tensor& indices, const Pool2d&, Into,
                         const Stream&);
/// The mean of each window. Padding counts as zeros (count_include_pad).
void avg_pool2d(const Tensor& out, const Tensor& x, const Pool2d&, const Stream&);
void avg_pool2d_backward(const Tensor& d_x, const Tensor& d_out, const Pool2d&, Into, const Stream&);
/// out[N, C, H', W']: means of rows floor(i H / H') to ceil((i + 1) H / H'), and of columns likewise.
void adaptive_avg_pool2d(const Tensor& out, const Tensor& x, const Stream&);
void adaptive_avg_pool2d_backward(const Tensor& d_x, const Tensor& d_out, Into, const Stream&);

// ---- batch norm (Ioffe and Szegedy, arXiv:1502.03167), of x[N, C], [N, C, L] or [N, C, H, W]
// In steps, between which ranks may add their sums.
/// sums (f64, [2 C + 1]) = {Σ x by channel, Σ x² by channel, number of terms of a channel}. The squares of
/// f32 are exact in double.
void batch_norm_sums(const Tensor& sums, const Tensor& x, const Stream&);
/// Buffers of f32 [C], and a scalar of i64; undefined: none are kept.
struct RunningStatistics {
  Tensor mean, variance, batches;
  float momentum = 0.1f;  ///< weight of a new batch; negative: the mean of all batches
};
/// mean[C] and inverse_deviation[C], in f32, of the biased variance. Adds the mean and the unbiased variance
/// to the running statistics, and one to the number of batches.
void batch_norm_statistics(const Tensor& mean, const Tensor& inverse_deviation, const RunningStatistics&,
                           const Tensor& sums, float epsilon, const Stream&);
/// The same of the running statistics, for evaluation.
void batch_norm_running(const Tensor& mean, const Tensor& inverse_deviation, const RunningStatistics&,
                        float epsilon, const Stream&);
/// out = (x - mean) · inverse_deviation · weight + bias, each [C].
void batch_norm(const Tensor& out, const Tensor& x, const Tensor& mean, const Tensor& inverse_deviation,
                const Tensor& weight, const Tensor& bias, const Stream&);
/// sums (f64, [2 C]) = {Σ d_out by channel, Σ d_out · n by channel}, where n is normalized x: the gradients
/// of bias and weight.
void batch_norm_backward_sums(const Tensor& sums, const Tensor& d_out, const Tensor& x, const Tensor& mean,
                              const Tensor& inverse_deviation, const Stream&);
/// d_weight and d_bias, each optional, from their sums.
void batch_norm_parameters_backward(const Tensor& d_weight, const Tensor& d_bias, const Tensor& sums, Into,
                                    const Stream&);
/// d_x of a batch normalized by its own statistics: `forward_sums` is of batch_norm_sums(), `backward_sums`
/// of batch_norm_backward_sums(). Both undefined: of one normalized by running statistics.
void batch_norm_backward(const Tensor& d_x, const Tensor& d_out, const Tensor& x, const Tensor& weight,
                         const Tensor& mean, const Tensor& inverse_deviation, const Tensor& forward_sums,
                         const Tensor& backward_sums, Into, const Stream&);

// ---- group norm (Wu and He, arXiv:1803.08494), of x[N, C], [N, C, L] or [N, C, H, W]
/// Each group of C / groups channels of an image is normalized; weight[C] and bias[C] are those of channels.
/// Writes mean[N, groups] and inverse_deviation[N, groups] in f32 for backward. groups is the last extent of
/// mean.
void group_norm(const Tensor& out, const Tensor& mean, const Tensor& inverse_deviation, const Tensor& x,
                const Tensor& weight, const Tensor& bias, float epsilon, const Stream&);
/// d_weight and d_bias are optional. d_x follows into_x.
void group_norm_backward(const Tensor& d_x, const Tensor& d_weight, const Tensor& d_bias, const Tensor& d_out,
                         const Tensor& x, const Tensor& weight, const Tensor& mean,
                         const Tensor& inverse_deviation, Into into_x, Into into_parameters, const Stream&);

}  // namespace rz::ops
