#pragma once
/// Windows of pooling, for both compilers.

#include "comm/core/math.h"
#include "tensor/image_ops.h"

namespace rz::ops::image {

/// Windows along one axis: of a fixed size, or those of adaptive pooling.
struct PoolAxis {
  long in, out;
  long kernel, stride, padding;  ///< kernel 0: adaptive

  /// Elements [begin, end) of the image in window i.
  RZ_HOST_DEVICE long begin(long i) const {
    if (kernel == 0) return i * in / out;
    const long first = i * stride - padding;
    return first > 0 ? first : 0;
  }
  RZ_HOST_DEVICE long end(long i) const {
    if (kernel == 0) return ((i + 1) * in + out - 1) / out;
    const long past = i * stride - padding + kernel;
    return past < in ? past : in;
  }
  /// Terms of the mean, padding among them.
  RZ_HOST_DEVICE long terms(long i) const { return kernel == 0 ? end(i) - begin(i) : kernel; }
  /// The first window that may contain element `at`; those that do follow each other.
  RZ_HOST_DEVICE long first_window(long at) const {
    if (kernel == 0) return at * out / in;
    const long reach = at + padding - kernel;
    return reach < 0 ? 0 : reach / stride + 1;
  }
};

struct PoolSizes {
  long planes;
  PoolAxis y, x;
  RZ_HOST_DEVICE long plane() const { return y.in * x.in; }
  RZ_HOST_DEVICE long positions() const { return y.out * x.out; }
};

/// Errc::invalid_argument as pool2d_shape().
PoolSizes pool_sizes(const char* op, const Shape& x, const Pool2d&);
/// Errc::invalid_argument unless the images have four extents, and `out` has positions.
PoolSizes adaptive_sizes(const char* op, const Shape& x, const Shape& out);

/// A candidate of a maximum, and whether it replaces another one: it is larger, or NaN.
RZ_HOST_DEVICE inline bool replaces(float x, float largest) { return x > largest || x != x; }

}  // namespace rz::ops::image
