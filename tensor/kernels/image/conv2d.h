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

// ---- one channel at a time
void depthwise(const Tensor& out, const Tensor& x, const Tensor& weight, const Tensor& bias, const ConvSizes&,
               const Stream&);
void depthwise_input(const Tensor& d_x, const Tensor& d_out, const Tensor& weight, const ConvSizes&, Into,
                     const Stream&);
void depthwise_weight(const Tensor& d_weight, const Tensor& d_out, const Tensor& x, const ConvSizes&, Into,
                      const Stream&);

}  // namespace rz::ops::image
