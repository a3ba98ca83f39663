#pragma once
/// Sizes of a convolution, and the parts of its kernels on the host.

#include <algorithm>
#include <cstddef>

#include "comm/core/integer_math.h"
#include "tensor/image_ops.h"

namespace rz::ops::image {

/// Sizes along one axis.
struct ConvAxis {
  std::size_t in, kernel, out, stride, padding, dilation;

  /// The outputs whose input under tap `k` lies within the image: [begin, end).
  std::size_t begin(std::size_t k) const {
    const std::size_t shift = k * dilation;
    return shift >= padding ? 0 : std::min(out, ceil_div(padding - shift, stride));
  }
  std::size_t end(std::size_t k) const {
    const std::size_t shift = k * dilation;
    return in + padding <= shift ? begin(k)
                                 : std::max(begin(k), std::min(out, ceil_div(in + padding - shift, stride)));
  }
  /// The input under tap `k` of output i, which lies within the image.
  std::size_t input(std::size_t i, std::size_t k) const { return i * stride + k * dilation - padding; }
};

struct ConvSizes {
  std::size_t images, channels, outputs, groups;
  ConvAxis y, x;

  std::size_t plane() const { return y.in * x.in; }
  std::size_t positions() const { return y.out * x.out; }
  std::size_t taps() const { return y.kernel * x.kernel; }
  std::size_t group_channels() const { return channels / groups; }
  std::size_t group_outputs() const { return outputs / groups; }
  /// Terms of an output.
  std::size_t depth() const { return group_channels() * taps(); }
  /// The input is the matrix of columns.
  bool is_product() const {
    return taps() == 1 && y.stride == 1 && x.stride == 1 && y.padding == 0 && x.padding == 0;
  }
  bool is_depthwise() const { return groups == channels && channels > 1; }
  /// Whether direct() and direct_input() compute it: the rows of padded inputs have few more columns than
  /// those of outputs, and the padding is not larger than the kernel.
  bool is_direct() const {
    const auto fits = [](const ConvAxis& a) {
      return a.stride == 1 && a.padding <= a.dilation * (a.kernel - 1);
    };
    return fits(y) && fits(x) && !is_product() && 6 * x.dilation * (x.kernel - 1) <= x.out;
  }
  /// The convolution with inputs and outputs exchanged, whose weights are mirrored: that of d_out to d_x, if
  /// strides are 1.
  ConvSizes transposed() const {
    const auto mirrored = [](const ConvAxis& a) {
      return ConvAxis{a.out, a.kernel, a.in, 1, a.dilation * (a.kernel - 1) - a.padding, a.dilation};
    };
    return {images, outputs, channels, groups, mirrored(y), mirrored(x)};
  }
};

/// Errc::invalid_argument as conv2d_shape().
ConvSizes conv_sizes(const Shape& x, const Shape& weight, const Conv2d&);

// ---- columns: row (channel, i, j) has the input under tap (i, j) of each position

/// Rows of the channels whose first plane is at `x`, for positions [begin, end): column p - begin of rows
/// `stride` elements apart.
template <class T>
void read_columns(T* to, std::size_t stride, const T* x, std::size_t channels, const ConvSizes&,
                  std::size_t begin, std::size_t end);
/// Adds the same columns to the planes of their channels.
void add_columns(float* planes, const float* from, std::size_t stride, std::size_t channels, const ConvSizes&,
                 std::size_t begin, std::size_t end);

// ---- without columns, in f32, if is_direct()

/// Rows of outputs of an image's group. Term k of position q is weight · in[offsets[k] + q], where rows of
/// positions are `width` apart; the weights are ordered for blocks of outputs.
struct DirectRows {
  const float* in;
  const std::size_t* offsets;
  const float *weight, *bias;  ///< bias: nullptr if there is none
  float *sums, *out;           ///< sums: of all positions, with room for vectors past the end
  std::size_t depth, outputs, rows, width, sums_stride, out_stride, out_width;
  bool accumulate;
};
/// `bias` is nullptr if there is none.
void direct(float* out, const float* x, const float* weight, const float* bias, const ConvSizes&,
            const Stream&);
void direct_input(float* d_x, const float* d_out, const float* weight, const ConvSizes&, Into, const Stream&);

// ---- one channel at a time
void depthwise(const Tensor& out, const Tensor& x, const Tensor& weight, const Tensor& bias, const ConvSizes&,
               const Stream&);
void depthwise_input(const Tensor& d_x, const Tensor& d_out, const Tensor& weight, const ConvSizes&, Into,
                     const Stream&);
void depthwise_weight(const Tensor& d_weight, const Tensor& d_out, const Tensor& x, const ConvSizes&, Into,
                      const Stream&);

}  // namespace rz::ops::image
