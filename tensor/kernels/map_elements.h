#pragma once
/// Element-wise kernels on a device: out[i] = f(in[i]…). For .cu files.

#include "comm/device/launch.h"
#include "tensor/kernels/dtype_dispatch.h"
#include "tensor/kernels/vector_load.h"
#include "tensor/tensor.h"

namespace rz::ops {

/// Base of element functions with `arity` inputs. A function has begin(), called once per thread, and
/// operator()(x) with x[0 … arity-1], called per element.
template <int inputs>
struct Function {
  static constexpr int arity = inputs;
  __device__ void begin() {}
};

/// F, added to the existing value of the output, which is passed as the last input.
template <class F>
struct Accumulated : F {
  static constexpr int arity = F::arity + 1;
  __device__ float operator()(const float* x) const { return x[F::arity] + F::operator()(x); }
};

template <class T, int count>
struct Inputs {
  const T* at[count ? count : 1];
};

template <class Out, class In>
inline constexpr int common_width = pack_width<Out> > pack_width<In> ? pack_width<Out> : pack_width<In>;

template <class F, class Out, class In>
__global__ void map_elements(F f, Split<common_width<Out, In>> split, Out* out, Inputs<In, F::arity> in) {
  f.begin();
  each_pack(split, std::size_t{blockIdx.x} * blockDim.x + threadIdx.x, std::size_t{gridDim.x} * blockDim.x,
            [&](auto width, std::size_t i) {
              constexpr int k = decltype(width)::value, arity = F::arity;
              float x[arity ? arity : 1][k], y[k];
#pragma unroll
              for (int a = 0; a < arity; ++a) load(x[a], in.at[a] + i);
#pragma unroll
              for (int j = 0; j < k; ++j) {
                float one[arity ? arity : 1];
#pragma unroll
                for (int a = 0; a < arity; ++a) one[a] = x[a][j];
                y[j] = f(one);
              }
              store(out + i, y);
            });
}

/// A matrix by the address of its first row.
template <class T>
struct StridedRows {
  T* data;
  std::size_t stride;
};
template <class T>
StridedRows<T> strided_rows(const Tensor& t, std::size_t columns) {
  return {t.data<std::remove_const_t<T>>(), t.contiguous() ? columns : t.row_stride()};
}

template <class T, int count>
struct StridedInputs {
  StridedRows<const T> at[count ? count : 1];
};

/// map_elements() where a tensor has a row stride: one block per row, one element at a time.
template <class F, class Out, class In>
__global__ void map_strided_rows(F f, std::size_t rows, std::size_t columns, StridedRows<Out> out,
                                 StridedInputs<In, F::arity> in) {
  constexpr int arity = F::arity;
  f.begin();
  for (std::size_t r = blockIdx.x; r < rows; r += gridDim.x)
    for (std::size_t i = threadIdx.x; i < columns; i += blockDim.x) {
      float x[arity ? arity : 1];
#pragma unroll
      for (int a = 0; a < arity; ++a) x[a] = to_f32(in.at[a].data[r * in.at[a].stride + i]);
      out.data[r * out.stride + i] = from_f32<Out>(f(x));
    }
}

/// Launches `f` on all elements. Inputs may alias `out`.
template <class Out, class In, class F, class... Tensors>
void map_as(const char* name, const F& f, const Stream& stream, const Tensor& out, const Tensors&... in) {
  static_assert(F::arity == sizeof...(in));
  if (!out.contiguous() || (!in.contiguous() || ...)) {
    const std::size_t columns = out.shape()[-1], rows = out.count() / columns;
    const StridedInputs<In, F::arity> strided{{strided_rows<const In>(in, columns)...}};
    const cuda::Grid grid{{static_cast<unsigned>(rows < 65536 ? rows : 65536)}, {256}};
    return cuda::launch(name, map_strided_rows<F, Out, In>, grid, stream, f, rows, columns,
                        strided_rows<Out>(out, columns), strided);
  }
  constexpr int width = common_width<Out, In>;
  Out* const to = out.data<Out>();
  const Inputs<In, F::arity> from{{in.template data<In>()...}};
  Split<width> split(out.count(), to);
  if constexpr (F::arity > 0 && pack_width<In> == width) split = Split<width>(out.count(), from.at[0]);
  split = split.with(to);
  for (int a = 0; a < F::arity; ++a) split = split.with(from.at[a]);
  cuda::launch(name, map_elements<F, Out, In>, cuda::grid_for(split.threads()), stream, f, split, to, from);
}

/// map_as() for tensors of one dtype.
template <class F, class... Tensors>
void map(const char* name, const F& f, const Stream& stream, const Tensor& out, const Tensors&... in) {
  dispatch_dtype(out.dtype(), [&](auto t) { map_as<decltype(t), decltype(t)>(name, f, stream, out, in...); });
}

template <class F, class... Tensors>
void map_into(const char* name, const F& f, bool accumulate, const Stream& stream, const Tensor& out,
              const Tensors&... in) {
  if (accumulate)
    map(name, Accumulated<F>{f}, stream, out, in..., out);
  else
    map(name, f, stream, out, in...);
}

}  // namespace rz::ops
