// Operators of two tensors, and of three. Those of equal shapes run on packs of elements; a broadcast one
// takes an element a thread, and computes the offsets of its operands.

#include "tensor/kernels/broadcast.h"
#include "tensor/kernels/device_ops.h"
#include "tensor/kernels/elementwise/functions_device.h"
#include "tensor/kernels/map_elements.h"

namespace rz::ops::device {

namespace {

struct Value : Function<2> {
  Binary op;
  __device__ float operator()(const float* x) const { return functions::value(op, x[0], x[1]); }
};

struct Where : Function<3> {
  __device__ float operator()(const float* x) const { return x[0] != 0 ? x[1] : x[2]; }
};

template <class T>
struct Operand {
  const T* data;
  IndexMap map;
  __device__ float operator[](std::size_t i) const { return to_f32(data[map.offset(i)]); }
};
template <class T>
Operand<T> operand_of(const Tensor& t, const Shape& to) {
  return {t.data<T>(), broadcast_map(t.shape(), to)};
}

/// Calls f(i) for all elements.
template <class F>
__device__ inline void each_element(std::size_t n, const F& f) {
  const std::size_t step = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += step) f(i);
}

template <class T>
__global__ void broadcast_binary(Binary op, T* out, Operand<T> a, Operand<T> b, std::size_t n) {
  each_element(n, [&](std::size_t i) { out[i] = from_f32<T>(functions::value(op, a[i], b[i])); });
}

template <class T>
__global__ void broadcast_gradient(Binary op, int operand, T* d, const T* d_out, Operand<T> a, Operand<T> b,
                                   std::size_t n) {
  each_element(n, [&](std::size_t i) {
    d[i] = from_f32<T>(functions::gradient(op, operand, to_f32(d_out[i]), a[i], b[i]));
  });
}

template <class T>
__global__ void broadcast_where(T* out, Operand<T> condition, Operand<T> a, Operand<T> b, std::size_t n) {
  each_element(n, [&](std::size_t i) { out[i] = from_f32<T>(condition[i] != 0 ? a[i] : b[i]); });
}

template <class T>
__global__ void expand_elements(float factor, bool accumulate, T* out, Operand<T> in, std::size_t n) {
  each_element(n, [&](std::size_t i) {
    const float x = factor * in[i];
    out[i] = from_f32<T>(accumulate ? to_f32(out[i]) + x : x);
  });
}

bool flat(const Tensor& out, const Tensor& in) { return out.count() == in.count(); }

}  // namespace

void binary(const Tensor& out, const Tensor& a, const Tensor& b, Binary op, const Stream& stream) {
  if (flat(out, a) && flat(out, b)) return map(name_of(op), Value{{}, op}, stream, out, a, b);
  dispatch_dtype(out.dtype(), [&](auto t) {
    using T = decltype(t);
    cuda::launch(name_of(op), broadcast_binary<T>, cuda::grid_for(out.count()), stream, op, out.data<T>(),
                 operand_of<T>(a, out.shape()), operand_of<T>(b, out.shape()), out.count());
  });
}

void binary_backward(const Tensor& d, const Tensor& d_out, const Tensor& a, const Tensor& b, Binary op,
                     int operand, const Stream& stream) {
  dispatch_dtype(d.dtype(), [&](auto t) {
    using T = decltype(t);
    cuda::launch("binary_backward", broadcast_gradient<T>, cuda::grid_for(d.count()), stream, op, operand,
                 d.data<T>(), d_out.data<T>(), operand_of<T>(a, d_out.shape()),
                 operand_of<T>(b, d_out.shape()), d.count());
  });
}

void where(const Tensor& out, const Tensor& condition, const Tensor& a, const Tensor& b,
           const Stream& stream) {
  if (flat(out, condition) && flat(out, a) && flat(out, b))
    return map("where", Where{}, stream, out, condition, a, b);
  dispatch_dtype(out.dtype(), [&](auto t) {
    using T = decltype(t);
    cuda::launch("where", broadcast_where<T>, cuda::grid_for(out.count()), stream, out.data<T>(),
                 operand_of<T>(condition, out.shape()), operand_of<T>(a, out.shape()),
                 operand_of<T>(b, out.shape()), out.count());
  });
}

void expand(const Tensor& out, const Tensor& in, float factor, Into into, const Stream& stream) {
  dispatch_dtype(out.dtype(), [&](auto t) {
    using T = decltype(t);
    cuda::launch("expand", expand_elements<T>, cuda::grid_for(out.count()), stream, factor,
                 into == Into::accumulate, out.data<T>(), operand_of<T>(in, out.shape()), out.count());
  });
}

}  // namespace rz::ops::device
