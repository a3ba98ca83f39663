// Normalization of matrices on the host; sums in double, in the order of the elements.

#include <cmath>

#include "tensor/kernels/check.h"
#include "tensor/kernels/device_ops.h"
#include "tensor/ops.h"

namespace rz::ops {

namespace {

/// Σ a b over `count` elements that stand `stride` apart.
double dot(const float* a, const float* b, std::size_t count, std::size_t stride) {
  double sum = 0;
  for (std::size_t i = 0; i < count * stride; i += stride) sum += double{a[i]} * b[i];
  return sum;
}

}  // namespace

void normalize(const Tensor& out, const Tensor& in, float epsilon, const Stream& stream) {
  check("normalize", {{"out", out}, {"in", in}},
        out.count() == in.count() && out.dtype() == DType::f32 && in.dtype() == DType::f32);
  if (const auto* d = on_device("normalize", out, stream)) return d->normalize(out, in, epsilon, stream);
  const auto norm = static_cast<float>(std::sqrt(dot(in.data<float>(), in.data<float>(), in.count(), 1)));
  scale(out, in, 1 / (norm + epsilon), stream);
}

void orthogonalize_columns(const Tensor& in_out, float epsilon, const Stream& stream) {
  check("orthogonalize_columns", {{"in_out", in_out}},
        in_out.shape().dims() == 2 && in_out.dtype() == DType::f32);
  if (in_out.count() == 0) return;
  if (const auto* d = on_device("orthogonalize_columns", in_out, stream))
    return d->orthogonalize_columns(in_out, epsilon, stream);
  const std::size_t n = in_out.shape()[0], r = in_out.shape()[1];
  float* const p = in_out.data<float>();
  for (std::size_t k = 0; k < r; ++k) {
    for (std::size_t before = 0; before < k; ++before) {
      const double part = dot(p + before, p + k, n, r);
      for (std::size_t i = 0; i < n * r; i += r)
        p[i + k] = static_cast<float>(p[i + k] - part * p[i + before]);
    }
    const double length = std::sqrt(dot(p + k, p + k, n, r)) + epsilon;
    for (std::size_t i = 0; i < n * r; i += r) p[i + k] = static_cast<float>(p[i + k] / length);
  }
}

}  // namespace rz::ops
