// Products by the table of blas.h. Bias gradients are fused into the weight gradient's product where the
// epilogue supports it. Otherwise they are column sums in two steps, in an order that depends on the shape
// only.

#include <algorithm>
#include <cstdint>

#include "comm/core/environment.h"
#include "comm/core/math.h"
#include "comm/device/launch.h"
#include "comm/device/memory.h"
#include "tensor/kernels/check.h"
#include "tensor/kernels/device_ops.h"
#include "tensor/kernels/linear_algebra/blas.h"

namespace rz::ops::device {

namespace {

using kernels::Epilogue;
using kernels::GemmCall;

// ---- sums over columns

constexpr unsigned lanes = 32, row_lanes = 8;

template <class T>
struct alignas(16) Vector {
  static constexpr unsigned size = 16 / sizeof(T);
  T values[size];
};

/// Elements from j on of a row; 0 beyond its end.
template <class T>
__device__ Vector<T> load_columns(const T* row, std::size_t j, std::size_t columns, bool aligned) {
  if (aligned && j + Vector<T>::size <= columns) return *reinterpret_cast<const Vector<T>*>(row + j);
  Vector<T> v;
  for (unsigned i = 0; i < Vector<T>::size; ++i) v.values[i] = j + i < columns ? row[j + i] : T{};
  return v;
}

/// parts[p, j] = sum of column j over the p-th group of `height` rows. A block of 32 x 8 threads covers 32
/// vectors of columns; each of its 8 thread rows sums every eighth matrix row.
template <class T>
__global__ void __launch_bounds__(lanes* row_lanes)
    sum_part_of_columns(float* __restrict__ parts, const T* __restrict__ x, std::size_t rows,
                        std::size_t columns, std::size_t stride, std::size_t height, bool aligned) {
  constexpr unsigned size = Vector<T>::size;
  RZ_SHARED(float, sums, row_lanes* lanes* size);
  const std::size_t j = (std::size_t{blockIdx.x} * lanes + threadIdx.x) * size;
  const std::size_t begin = blockIdx.y * height, end = begin + height < rows ? begin + height : rows;
  float mine[size] = {};
#pragma unroll 4
  for (std::size_t i = begin + threadIdx.y; i < end; i += row_lanes) {
    const Vector<T> v = load_columns(x + i * stride, j, columns, aligned);
    for (unsigned e = 0; e < size; ++e) mine[e] += to_f32(v.values[e]);
  }
  for (unsigned e = 0; e < size; ++e) sums[(threadIdx.y * size + e) * lanes + threadIdx.x] = mine[e];
  __syncthreads();
  if (threadIdx.y != 0) return;
  for (unsigned e = 0; e < size; ++e) {
    float sum = 0;
    for (unsigned y = 0; y < row_lanes; ++y) sum += sums[(y * size + e) * lanes + threadIdx.x];
    if (j + e < columns) parts[blockIdx.y * columns + j + e] = sum;
  }
}

template <class T>
__global__ void add_parts(T* __restrict__ out, const float* __restrict__ parts, std::size_t count,
                          std::size_t columns, bool accumulate) {
  const std::size_t j = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (j >= columns) return;
  double sum = accumulate ? double{to_f32(out[j])} : 0;
  for (std::size_t p = 0; p < count; ++p) sum += parts[p * columns + j];
  out[j] = from_f32<T>(static_cast<float>(sum));
}

/// Calls f with a null pointer to the element type.
template <class F>
void with_type(DType t, const F& f) {
  if (t == DType::f16) return f(static_cast<f16*>(nullptr));
  if (t == DType::bf16) return f(static_cast<bf16*>(nullptr));
  f(static_cast<float*>(nullptr));
}

/// d_bias = column sums of d_out.
void bias_gradient(const Tensor& d_bias, const Tensor& d_out, Into into, const Stream& stream) {
  const std::size_t n = rows(d_out), columns = last(d_out), stride = d_out.row_stride();
  const std::size_t height = std::max<std::size_t>(64, (n + 127) / 128), count = (n + height - 1) / height;
  auto* const parts = static_cast<float*>(stream.workspace(count * columns * sizeof(float)));
  with_type(d_out.dtype(), [&]<class T>(T*) {
    const std::size_t width = lanes * Vector<T>::size;
    const bool aligned =
        stride % Vector<T>::size == 0 && reinterpret_cast<std::uintptr_t>(d_out.raw()) % 16 == 0;
    const cuda::Grid grid{
        {static_cast<unsigned>((columns + width - 1) / width), static_cast<unsigned>(count)},
        {lanes, row_lanes}};
    cuda::launch("sum_part_of_columns", sum_part_of_columns<T>, grid, stream, parts, d_out.data<T>(), n,
                 columns, stride, height, aligned);
  });
  with_type(d_bias.dtype(), [&]<class T>(T*) {
    cuda::launch("add_parts", add_parts<T>, cuda::grid_for(columns, 128), stream, d_bias.data<T>(), parts,
                 count, columns, into == Into::accumulate);
  });
}

// ---- products

struct Factor {
  const Tensor& tensor;
  bool transposed = false;
};

/// d[m, n] = a · b. Errc::invalid_argument unless both operands have one dtype, and the result that dtype or
/// f32.
GemmCall product(const char* op, std::size_t m, std::size_t n, std::size_t k, const Tensor& d,
                 const Factor& a, const Factor& b, Into into) {
  if (a.tensor.dtype() != b.tensor.dtype() || (d.dtype() != a.tensor.dtype() && d.dtype() != DType::f32))
    fail(Errc::invalid_argument, op, ": a product of ", name(a.tensor.dtype()), " and ",
         name(b.tensor.dtype()), " into ", name(d.dtype()),
         "; the factors must be of one type, the result of theirs or f32");
  return {.m = m,
          .n = n,
          .k = k,
          .a = a.tensor.raw(),
          .a_stride = a.tensor.row_stride(),
          .transpose_a = a.transposed,
          .b = b.tensor.raw(),
          .b_stride = b.tensor.row_stride(),
          .transpose_b = b.transposed,
          .d = d.raw(),
          .d_stride = d.row_stride(),
          .factors = a.tensor.dtype(),
          .result = d.dtype(),
          .beta = into == Into::accumulate ? 1.0f : 0.0f,
          .allow_tf32 = environment().allow_tf32};
}

void require_type(const char* op, const char* what, const Tensor& t, DType wanted) {
  if (t.dtype() != wanted)
    fail(Errc::invalid_argument, op, ": ", what, " is ", name(t.dtype()), ", expected ", name(wanted));
}

void run(const char* op, GemmCall call, const Stream& stream) {
  if (call.m == 0 || call.n == 0) return;
  if (const auto parts = kernels::split_whole_words(call)) {
    run(op, parts->first, stream);
    return run(op, parts->second, stream);
  }
  const kernels::Blas& blas = kernels::blas();
  if (call.k == 0) {  // an empty sum
    require(call.epilogue == Epilogue::none, Errc::invalid_argument, op, ": the inputs have no elements");
    const std::size_t size = size_of(call.result);
    for (std::size_t i = 0; i < call.batch.count * call.m && call.beta == 0; ++i) {
      const std::size_t row = i / call.m * call.batch.d_step + i % call.m * call.d_stride;
      memset_async(static_cast<std::byte*>(call.d) + row * size, 0, call.n * size, stream);
    }
    return;
  }
  call.workspace = stream.workspace(blas.workspace_bytes(stream.device()));
  blas.gemm(call, stream.device(), stream.native());
}

/// Copies `row` to every row of out[rows, columns].
template <class T>
__global__ void repeat_row(T* __restrict__ out, const T* __restrict__ row, std::size_t rows,
                           std::size_t columns, std::size_t stride) {
  const std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < rows * columns) out[i / columns * stride + i % columns] = row[i % columns];
}

bool can(const GemmCall& call, const Stream& stream) {
  return call.m > 0 && call.n > 0 && call.k > 0 && kernels::blas().can(call, stream.device());
}

/// x[N, I] · W
GemmCall forward(const char* op, const Tensor& out, const Tensor& x, const Tensor& weight, const Tensor& bias,
                 WeightLayout layout) {
  GemmCall call = product(op, rows(out), last(out), last(x), out, {x},
                          {weight, layout == WeightLayout::out_in}, Into::overwrite);
  if (!bias.defined()) return call;
  require_type(op, "bias", bias, out.dtype());
  call.epilogue = Epilogue::bias;
  call.bias = bias.raw();
  return call;
}

/// d_out[N, O] · Wᵀ
GemmCall input_gradient(const char* op, const Tensor& d_x, const Tensor& d_out, const Tensor& weight,
                        WeightLayout layout, Into into) {
  return product(op, rows(d_x), last(d_x), last(d_out), d_x, {d_out},
                 {weight, layout == WeightLayout::in_out}, into);
}

/// xᵀ · d_out, or its transpose, according to the weight's layout.
GemmCall weight_gradient(const char* op, const Tensor& d_weight, const Tensor& d_out, const Tensor& x,
                         WeightLayout layout, Into into) {
  const bool in_out = layout == WeightLayout::in_out;
  const Tensor &first = in_out ? x : d_out, &second = in_out ? d_out : x;
  return product(op, last(first), last(second), rows(x), d_weight, {first, true}, {second}, into);
}

}  // namespace

void linear(const Tensor& out, const Tensor& x, const Tensor& weight, const Tensor& bias, WeightLayout layout,
            const Stream& stream) {
  GemmCall call = forward("linear", out, x, weight, bias, layout);
  if (bias.defined() && !can(call, stream)) {  // add the product to the bias instead; rounds once as well
    with_type(out.dtype(), [&]<class T>(T*) {
      cuda::launch("repeat_row", repeat_row<T>, cuda::grid_for(out.count(), 256, ~std::size_t{0}), stream,
                   out.data<T>(), bias.data<T>(), rows(out), last(out), out.row_stride());
    });
    call.epilogue = Epilogue::none;
    call.bias = nullptr;
    call.beta = 1;
  }
  run("linear", call, stream);
}

void linear_gelu(const Tensor& out, const Tensor& pre, const Tensor& x, const Tensor& weight,
                 const Tensor& bias, WeightLayout layout, const Stream& stream) {
  constexpr const char* op = "linear_gelu";
  require_type(op, "pre", pre, out.dtype());
  GemmCall call = forward(op, out, x, weight, bias, layout);
  call.epilogue = Epilogue::gelu;
  call.aux = pre.raw();
  if (can(call, stream)) return run(op, call, stream);
  device::linear(pre, x, weight, bias, layout, stream);
  device::gelu(out, pre, stream);
}

void linear_backward_through_gelu(const Tensor& d_pre, const Tensor& d_out, const Tensor& weight,
                                  const Tensor& pre, WeightLayout layout, const Stream& stream) {
  constexpr const char* op = "linear_backward_through_gelu";
  require_type(op, "pre", pre, d_pre.dtype());
  GemmCall call = input_gradient(op, d_pre, d_out, weight, layout, Into::overwrite);
  call.epilogue = Epilogue::gelu_gradient;
  call.aux = pre.raw();
  if (can(call, stream)) return run(op, call, stream);
  run(op, input_gradient(op, d_pre, d_out, weight, layout, Into::overwrite), stream);
  device::gelu_backward(d_pre, d_pre, pre, Into::overwrite, stream);
}

void linear_backward(const Tensor& d_x, const Tensor& d_weight, const Tensor& d_bias, const Tensor& d_out,
                     const Tensor& x, const Tensor& weight, WeightLayout layout, Into into_x,
                     Into into_parameters, const Stream& stream) {
  constexpr const char* op = "linear_backward";
  if (d_x.defined()) run(op, input_gradient(op, d_x, d_out, weight, layout, into_x), stream);
  bool bias_left = d_bias.defined();
  if (d_weight.defined()) {
    const GemmCall call = weight_gradient(op, d_weight, d_out, x, layout, into_parameters);
    GemmCall with_bias = call;
    with_bias.epilogue =
        layout == WeightLayout::in_out ? Epilogue::column_sums_of_b : Epilogue::row_sums_of_a;
    with_bias.bias = d_bias.raw();
    const bool both = bias_left && d_bias.dtype() == d_weight.dtype() && into_parameters == Into::overwrite &&
                      can(with_bias, stream);
    run(op, both ? with_bias : call, stream);
    bias_left &= !both;
  }
  if (bias_left) bias_gradient(d_bias, d_out, into_parameters, stream);
}

void matmul(const Tensor& out, const Tensor& a, bool transpose_a, const Tensor& b, bool transpose_b,
            Into into, const Stream& stream) {
  const std::size_t m = out.shape()[-2], n = out.shape()[-1], k = a.shape()[transpose_a ? -2 : -1];
  GemmCall call = product("matmul", m, n, k, out, {a, transpose_a}, {b, transpose_b}, into);
  const auto step = [](const Tensor& t) { return t.shape().dims() > 2 ? t.shape()[-2] * t.row_stride() : 0; };
  call.batch = {out.count() / (m * n), step(a), step(b), step(out)};
  run("matmul", call, stream);
}

}  // namespace rz::ops::device
