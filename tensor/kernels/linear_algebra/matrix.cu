// One block per matrix, since its threads wait for sums over all of it; sums in double. A thread has the same
// rows in every loop over columns.

#include "tensor/kernels/block_sum.h"
#include "tensor/kernels/device_ops.h"

namespace rz::ops::device {

namespace {

[[maybe_unused]] constexpr unsigned max_threads = 512;

__global__ void __launch_bounds__(max_threads)
    normalize_all(float* out, const float* in, std::size_t n, float epsilon) {
  double part = 0;
  for (std::size_t i = threadIdx.x; i < n; i += blockDim.x) part += static_cast<double>(in[i]) * in[i];
  const float factor = 1 / (static_cast<float>(sqrt(block_sum(part))) + epsilon);
  for (std::size_t i = threadIdx.x; i < n; i += blockDim.x) out[i] = factor * in[i];
}

/// Σ a b over the rows of a matrix of r columns.
__device__ inline double dot(const float* a, const float* b, std::size_t n, std::size_t r) {
  double part = 0;
  for (std::size_t i = threadIdx.x; i < n; i += blockDim.x) part += static_cast<double>(a[i * r]) * b[i * r];
  return block_sum(part);
}

__global__ void __launch_bounds__(max_threads)
    orthogonalize(float* p, std::size_t n, std::size_t r, float epsilon) {
  for (std::size_t k = 0; k < r; ++k) {
    for (std::size_t before = 0; before < k; ++before) {
      const double part = dot(p + before, p + k, n, r);
      for (std::size_t i = threadIdx.x; i < n; i += blockDim.x)
        p[i * r + k] = static_cast<float>(p[i * r + k] - part * p[i * r + before]);
    }
    const double length = sqrt(dot(p + k, p + k, n, r)) + epsilon;
    for (std::size_t i = threadIdx.x; i < n; i += blockDim.x)
      p[i * r + k] = static_cast<float>(p[i * r + k] / length);
  }
}

}  // namespace

void normalize(const Tensor& out, const Tensor& in, float epsilon, const Stream& stream) {
  cuda::launch("normalize", normalize_all, {{1}, {threads_for_row(in.count())}}, stream, out.data<float>(),
               static_cast<const float*>(in.data<float>()), in.count(), epsilon);
}

void orthogonalize_columns(const Tensor& in_out, float epsilon, const Stream& stream) {
  const std::size_t rows = in_out.shape()[0];
  cuda::launch("orthogonalize_columns", orthogonalize, {{1}, {threads_for_row(rows)}}, stream,
               in_out.data<float>(), rows, in_out.shape()[1], epsilon);
}

}  // namespace rz::ops::device
