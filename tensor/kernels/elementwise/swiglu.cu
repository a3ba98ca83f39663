// The value that silu() would store is rounded to the dtype, as in swiglu.cpp.

#include "tensor/kernels/device_ops.h"
#include "tensor/kernels/elementwise/functions_device.h"
#include "tensor/kernels/map_elements.h"

namespace rz::ops::device {

namespace {

template <class T>
__device__ float rounded(float x) {
  return to_f32(from_f32<T>(x));
}

template <class T>
struct Swiglu : Function<2> {
  __device__ float operator()(const float* in) const {
    return rounded<T>(functions::silu::value(in[0])) * in[1];
  }
};

/// d_gate and d_up may be null, but not both.
template <class T>
__global__ void swiglu_gradients(Split<pack_width<T>> split, T* d_gate, T* d_up, const T* d_out,
                                 const T* gate, const T* up, bool accumulate_gate, bool accumulate_up) {
  each_pack(split, std::size_t{blockIdx.x} * blockDim.x + threadIdx.x, std::size_t{gridDim.x} * blockDim.x,
            [&](auto width, std::size_t i) {
              constexpr int k = decltype(width)::value;
              float dy[k], g[k], u[k], dg[k] = {}, du[k] = {};
              load(dy, d_out + i), load(g, gate + i), load(u, up + i);
              if (accumulate_gate) load(dg, d_gate + i);
              if (accumulate_up) load(du, d_up + i);
#pragma unroll
              for (int j = 0; j < k; ++j) {
                du[j] += dy[j] * rounded<T>(functions::silu::value(g[j]));
                dg[j] += functions::silu::gradient(rounded<T>(dy[j] * u[j]), g[j]);
              }
              if (d_gate) store(d_gate + i, dg);
              if (d_up) store(d_up + i, du);
            });
}

}  // namespace

void swiglu(const Tensor& out, const Tensor& gate, const Tensor& up, const Stream& stream) {
  dispatch_dtype(out.dtype(), [&](auto t) {
    using T = decltype(t);
    map_as<T, T>("swiglu", Swiglu<T>{}, stream, out, gate, up);
  });
}

void swiglu_backward(const Tensor& d_gate, const Tensor& d_up, const Tensor& d_out, const Tensor& gate,
                     const Tensor& up, Into into_gate, Into into_up, const Stream& stream) {
  dispatch_dtype(d_out.dtype(), [&](auto t) {
    using T = decltype(t);
    const auto target = [](const Tensor& d) { return d.defined() ? d.data<T>() : nullptr; };
    T *const to_gate = target(d_gate), *const to_up = target(d_up);
    if (!to_gate && !to_up) return;
    const T *const dy = d_out.data<T>(), *const g = gate.data<T>(), *const u = up.data<T>();
    Split<pack_width<T>> split(d_out.count(), dy);
    split = split.with(dy).with(g).with(u);
    if (to_gate) split = split.with(to_gate);
    if (to_up) split = split.with(to_up);
    cuda::launch("swiglu_backward", swiglu_gradients<T>, cuda::grid_for(split.threads()), stream, split,
                 to_gate, to_up, dy, g, u, to_gate && into_gate == Into::accumulate,
                 to_up && into_up == Into::accumulate);
  });
}

}  // namespace rz::ops::device
