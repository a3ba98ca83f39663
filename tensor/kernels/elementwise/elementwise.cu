#include "comm/device/memory.h"
#include "tensor/kernels/block_sum.h"
#include "tensor/kernels/device_ops.h"
#include "tensor/kernels/map_elements.h"

namespace rz::ops::device {

namespace {

struct Fill : Function<0> {
  float value;
  __device__ float operator()(const float*) const { return value; }
};
struct Same : Function<1> {
  __device__ float operator()(const float* x) const { return x[0]; }
};
struct Scale : Function<1> {
  float factor;
  __device__ float operator()(const float* x) const { return factor * x[0]; }
};
struct ScaledDifference : Function<2> {
  const float* d_loss;
  double count;
  float factor;
  __device__ void begin() { factor = static_cast<float>(2.0 * *d_loss / count); }
  __device__ float operator()(const float* x) const { return factor * (x[0] - x[1]); }
};

/// One block suffices: this loss is used by small networks.
template <class T>
__global__ void mean_of_squares(float* loss, const T* a, const T* b, Split<pack_width<T>> split) {
  double sum = 0;
  each_pack(split, threadIdx.x, blockDim.x, [&](auto width, std::size_t i) {
    constexpr int k = decltype(width)::value;
    float x[k], y[k];
    load(x, a + i), load(y, b + i);
    for (int j = 0; j < k; ++j) {
      const double difference = static_cast<double>(x[j]) - static_cast<double>(y[j]);
      sum += difference * difference;
    }
  });
  sum = block_sum(sum);
  if (threadIdx.x == 0) *loss = static_cast<float>(sum / static_cast<double>(split.n ? split.n : 1));
}

}  // namespace

void fill(const Tensor& out, float value, const Stream& stream) { map("fill", Fill{{}, value}, stream, out); }

void copy(const Tensor& out, const Tensor& in, const Stream& stream) {
  if (out.count() == 0) return;
  if (out.dtype() == in.dtype() && out.contiguous() && in.contiguous())
    return memcpy_async(out.raw(), in.raw(), out.bytes(), stream);
  dispatch_dtype(out.dtype(), [&](auto o) {
    dispatch_dtype(in.dtype(),
                   [&](auto i) { map_as<decltype(o), decltype(i)>("copy", Same{}, stream, out, in); });
  });
}

void add_scaled(const Tensor& out, const Tensor& in, float factor, const Stream& stream) {
  map("add_scaled", Accumulated<Scale>{{{}, factor}}, stream, out, in, out);
}

void scale(const Tensor& out, const Tensor& in, float factor, const Stream& stream) {
  map("scale", Scale{{}, factor}, stream, out, in);
}

void mean_squared_error(const Tensor& loss, const Tensor& a, const Tensor& b, const Stream& stream) {
  dispatch_dtype(a.dtype(), [&](auto t) {
    using T = decltype(t);
    const T *x = a.data<T>(), *y = b.data<T>();
    const auto split = Split<pack_width<T>>(a.count(), x).with(y);
    const cuda::Grid grid{{1}, {threads_for_row(split.threads(), 1024)}};
    cuda::launch("mean_squared_error", mean_of_squares<T>, grid, stream, loss.data<float>(), x, y, split);
  });
}

void mean_squared_error_backward(const Tensor& d_a, const Tensor& d_loss, const Tensor& a, const Tensor& b,
                                 Into into, const Stream& stream) {
  const ScaledDifference f{{}, d_loss.data<float>(), static_cast<double>(a.count()), 0};
  map_into("mean_squared_error_backward", f, into == Into::accumulate, stream, d_a, a, b);
}

}  // namespace rz::ops::device
