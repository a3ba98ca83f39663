// Pooling on a device, a thread per result. A gradient sums the windows that contain its element, in their
// order.

#include "comm/device/launch.h"
#include "tensor/kernels/device_ops.h"
#include "tensor/kernels/dtype_dispatch.h"
#include "tensor/kernels/image/pool2d.h"

namespace rz::ops::device {

namespace {

using image::PoolSizes;

__device__ inline long first_result() { return long{blockIdx.x} * blockDim.x + threadIdx.x; }
__device__ inline long results_at_once() { return long{gridDim.x} * blockDim.x; }

template <class T>
__global__ void max_of_windows(T* __restrict__ out, std::int32_t* __restrict__ indices,
                               const T* __restrict__ x, PoolSizes s) {
  for (long k = first_result(); k < s.planes * s.positions(); k += results_at_once()) {
    const long position = k % s.positions(), row = position / s.x.out, column = position % s.x.out;
    const T* const plane = x + k / s.positions() * s.plane();
    const long left = s.x.begin(column), right = s.x.end(column);
    long index = s.y.begin(row) * s.x.in + left;
    float max = -INFINITY;
    for (long h = s.y.begin(row); h < s.y.end(row); ++h)
      for (long w = left; w < right; ++w)
        if (const float v = to_f32(plane[h * s.x.in + w]); image::replaces(v, max))
          max = v, index = h * s.x.in + w;
    out[k] = from_f32<T>(max);
    indices[k] = static_cast<std::int32_t>(index);
  }
}

template <class T>
__global__ void mean_of_windows(T* __restrict__ out, const T* __restrict__ x, PoolSizes s) {
  for (long k = first_result(); k < s.planes * s.positions(); k += results_at_once()) {
    const long position = k % s.positions(), row = position / s.x.out, column = position % s.x.out;
    const T* const plane = x + k / s.positions() * s.plane();
    double sum = 0;
    for (long h = s.y.begin(row); h < s.y.end(row); ++h)
      for (long w = s.x.begin(column); w < s.x.end(column); ++w)
        sum += static_cast<double>(to_f32(plane[h * s.x.in + w]));
    out[k] = from_f32<T>(static_cast<float>(sum / static_cast<double>(s.y.terms(row) * s.x.terms(column))));
  }
}

/// share(window of the plane, its row, its column, position in the plane): what the window adds to it.
template <class T, class F>
__device__ void add_windows(T* d_x, const PoolSizes& s, bool accumulate, const F& share) {
  for (long k = first_result(); k < s.planes * s.plane(); k += results_at_once()) {
    const long at = k % s.plane(), h = at / s.x.in, w = at % s.x.in;
    const long windows = k / s.plane() * s.positions();
    float sum = 0;
    for (long y = s.y.first_window(h); y < s.y.out && s.y.begin(y) <= h; ++y) {
      if (s.y.end(y) <= h) continue;
      for (long x = s.x.first_window(w); x < s.x.out && s.x.begin(x) <= w; ++x)
        if (s.x.end(x) > w) sum += share(windows + y * s.x.out + x, y, x, at);
    }
    d_x[k] = from_f32<T>(accumulate ? to_f32(d_x[k]) + sum : sum);
  }
}

template <class T>
__global__ void max_backward(T* __restrict__ d_x, const T* __restrict__ d_out,
                             const std::int32_t* __restrict__ indices, PoolSizes s, bool accumulate) {
  add_windows(d_x, s, accumulate, [&](long window, long, long, long at) {
    return indices[window] == at ? to_f32(d_out[window]) : 0.0f;
  });
}

template <class T>
__global__ void mean_backward(T* __restrict__ d_x, const T* __restrict__ d_out, PoolSizes s,
                              bool accumulate) {
  add_windows(d_x, s, accumulate, [&](long window, long y, long x, long) {
    return to_f32(d_out[window]) / static_cast<float>(s.y.terms(y) * s.x.terms(x));
  });
}

void mean_pool(const char* op, const Tensor& out, const Tensor& x, const PoolSizes& s, const Stream& stream) {
  dispatch_dtype(x.dtype(), [&](auto t) {
    using T = decltype(t);
    cuda::launch(op, mean_of_windows<T>, cuda::grid_for(out.count()), stream, out.data<T>(), x.data<T>(), s);
  });
}

void mean_pool_backward(const char* op, const Tensor& d_x, const Tensor& d_out, const PoolSizes& s, Into into,
                        const Stream& stream) {
  dispatch_dtype(d_x.dtype(), [&](auto t) {
    using T = decltype(t);
    cuda::launch(op, mean_backward<T>, cuda::grid_for(d_x.count()), stream, d_x.data<T>(), d_out.data<T>(), s,
                 into == Into::accumulate);
  });
}

}  // namespace

void max_pool2d(const Tensor& out, const Tensor& indices, const Tensor& x, const Pool2d& pool,
                const Stream& stream) {
  const PoolSizes s = image::pool_sizes("max_pool2d", x.shape(), pool);
  dispatch_dtype(x.dtype(), [&](auto t) {
    using T = decltype(t);
    cuda::launch("max_pool2d", max_of_windows<T>, cuda::grid_for(out.count()), stream, out.data<T>(),
                 indices.data<std::int32_t>(), x.data<T>(), s);
  });
}

void max_pool2d_backward(const Tensor& d_x, const Tensor& d_out, const Tensor& indices, const Pool2d& pool,
                         Into into, const Stream& stream) {
  const PoolSizes s = image::pool_sizes("max_pool2d_backward", d_x.shape(), pool);
  dispatch_dtype(d_x.dtype(), [&](auto t) {
    using T = decltype(t);
    cuda::launch("max_pool2d_backward", max_backward<T>, cuda::grid_for(d_x.count()), stream, d_x.data<T>(),
                 d_out.data<T>(), indices.data<std::int32_t>(), s, into == Into::accumulate);
  });
}

void avg_pool2d(const Tensor& out, const Tensor& x, const Pool2d& pool, const Stream& stream) {
  mean_pool("avg_pool2d", out, x, image::pool_sizes("avg_pool2d", x.shape(), pool), stream);
}

void avg_pool2d_backward(const Tensor& d_x, const Tensor& d_out, const Pool2d& pool, Into into,
                         const Stream& stream) {
  constexpr const char* op = "avg_pool2d_backward";
  mean_pool_backward(op, d_x, d_out, image::pool_sizes(op, d_x.shape(), pool), into, stream);
}

void adaptive_avg_pool2d(const Tensor& out, const Tensor& x, const Stream& stream) {
  constexpr const char* op = "adaptive_avg_pool2d";
  mean_pool(op, out, x, image::adaptive_sizes(op, x.shape(), out.shape()), stream);
}

void adaptive_avg_pool2d_backward(const Tensor& d_x, const Tensor& d_out, Into into, const Stream& stream) {
  constexpr const char* op = "adaptive_avg_pool2d_backward";
  mean_pool_backward(op, d_x, d_out, image::adaptive_sizes(op, d_x.shape(), d_out.shape()), into, stream);
}

}  // namespace rz::ops::device
