#include <cstring>

#include "tensor/kernels/check.h"
#include "tensor/kernels/column_sum.h"
#include "tensor/kernels/device_ops.h"
#include "tensor/kernels/linear_algebra/gemm.h"
#include "tensor/kernels/linear_algebra/gemm_16bit.h"
#include "tensor/kernels/linear_algebra/gemm_few_rows.h"
#include "tensor/ops.h"

namespace rz {

namespace ops {

namespace {

using kernels::Matrix16;
using kernels::Product16;

struct Sizes {
  std::size_t rows, in, out;
};

/// rows(), also of a tensor without columns.
std::size_t all_rows(const Tensor& t) {
  std::size_t product = 1;
  for (int d = 0; d + 1 < t.shape().dims(); ++d) product *= t.shape()[d];
  return product;
}

bool weight_fits(const Tensor& weight, const Sizes& s, WeightLayout layout) {
  return weight.shape() == (layout == WeightLayout::in_out ? Shape{s.in, s.out} : Shape{s.out, s.in});
}

/// A two-dimensional reading of a tensor: rows of last(tensor) elements, row_stride() apart.
struct Operand {
  const Tensor& tensor;
  bool transposed = false;
};

void copy_to_rows(float* out, std::size_t stride, std::size_t rows, const Tensor& bias,
                  const Stream& stream) {
  const std::size_t n = bias.count();
  const float* b = bias.data<float>();
  stream.parallel_for(rows, 8, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) std::memcpy(out + i * stride, b, n * sizeof(float));
  });
}

kernels::Matrix matrix(const Operand& o) {
  return {o.tensor.data<float>(), o.tensor.row_stride(), o.transposed};
}

Matrix16 matrix16(const Operand& o) {
  return {reinterpret_cast<const std::uint16_t*>(o.tensor.raw()), o.tensor.row_stride(), o.transposed};
}

/// Both factors have one dtype, and the result has that or f32.
void check_product(const char* op, const Tensor& out, DType a, DType b) {
  if (b != a || (out.dtype() != a && out.dtype() != DType::f32))
    fail(Errc::invalid_argument, op, ": a product of ", name(a), " and ", name(b), " with a result in ",
         name(out.dtype()), "; both factors must have one type, and the result too, or f32");
}

/// With f32 the product starts from the bias, at no cost: without it the BLAS would set `out` to 0 and then
/// add.
void multiply_f32(const Tensor& out, const Sizes& s, const Operand& a, const Operand& b, const Tensor& bias,
                  Into into, const Stream& stream) {
  float* const o = out.data<float>();
  if (bias.defined()) copy_to_rows(o, out.row_stride(), s.rows, bias, stream);
  const float beta = bias.defined() || into == Into::accumulate ? 1 : 0;
  kernels::gemm(o, out.row_stride(), s.rows, s.out, s.in, 1, matrix(a), matrix(b), beta, stream);
}

/// out[rows, out] = a[rows, in] · b[in, out] (+ bias[out]), or added to out. A 16-bit product may have an f32
/// result.
void multiply(const char* op, const Tensor& out, const Sizes& s, const Operand& a, const Operand& b,
              const Tensor& bias, Into into, const Stream& stream) {
  const DType factors = a.tensor.dtype();
  check_product(op, out, factors, b.tensor.dtype());
  check_dtype(op, factors, {{"bias", bias}});
  if (s.rows <= kernels::max_few_rows && !a.transposed && into == Into::overwrite)
    return kernels::gemm_few_rows({.m = s.rows,
                                   .n = s.out,
                                   .k = s.in,
                                   .factors = factors,
                                   .a = a.tensor.raw(),
                                   .a_stride = a.tensor.row_stride(),
                                   .b = b.tensor.raw(),
                                   .b_stride = b.tensor.row_stride(),
                                   .b_transposed = b.transposed,
                                   .c = out.raw(),
                                   .result = out.dtype(),
                                   .c_stride = out.row_stride(),
                                   .bias = bias.defined() ? bias.raw() : nullptr},
                                  stream);
  if (factors == DType::f32) return multiply_f32(out, s, a, b, bias, into, stream);
  kernels::gemm_16bit({.m = s.rows,
                       .n = s.out,
                       .k = s.in,
                       .factors = factors,
                       .a = matrix16(a),
                       .b = matrix16(b),
                       .c = out.raw(),
                       .result = out.dtype(),
                       .c_stride = out.row_stride(),
                       .bias = bias.defined() ? bias.raw() : nullptr,
                       .accumulate = into == Into::accumulate},
                      stream);
}

}  // namespace

void linear(const Tensor& out, const Tensor& x, const Tensor& weight, const Tensor& bias, WeightLayout layout,
            const Stream& stream) {
  const Sizes s{all_rows(x), last(x), last(out)};
  const bool fits = all_rows(out) == s.rows && weight_fits(weight, s, layout) && optional_vector(bias, s.out);
  if (bias.defined())
    check("linear", {{"out", out}, {"x", x}, {"weight", weight}, {"bias", bias}}, fits, Rows::any_stride);
  else
    check("linear", {{"out", out}, {"x", x}, {"weight", weight}}, fits, Rows::any_stride);
  if (const auto* d = on_device("linear", out, stream))
    return d->linear(out, x, weight, bias, layout, stream);
  multiply("linear", out, s, {x}, {weight, layout == WeightLayout::out_in}, bias, Into::overwrite, stream);
}

void linear_backward(const Tensor& d_x, const Tensor& d_weight, const Tensor& d_bias, const Tensor& d_out,
                     const Tensor& x, const Tensor& weight, WeightLayout layout, Into into_x,
                     Into into_parameters, const Stream& stream) {
  constexpr const char* op = "linear_backward";
  const Sizes s{all_rows(x), last(x), last(d_out)};
  const bool in_out = layout == WeightLayout::in_out;
  check(op, {{"d_out", d_out}, {"x", x}, {"weight", weight}},
        all_rows(d_out) == s.rows && weight_fits(weight, s, layout), Rows::any_stride);
  if (d_x.defined())
    check(op, {{"d_x", d_x}, {"x", x}}, all_rows(d_x) == s.rows && last(d_x) == s.in, Rows::any_stride);
  if (d_weight.defined())
    check(op, {{"d_weight", d_weight}, {"weight", weight}}, d_weight.shape() == weight.shape(),
          Rows::any_stride);
  if (d_bias.defined())
    check(op, {{"d_bias", d_bias}, {"d_out", d_out}}, is_vector(d_bias, s.out), Rows::any_stride);
  if (const auto* d = on_device("linear_backward", d_out, stream))
    return d->linear_backward(d_x, d_weight, d_bias, d_out, x, weight, layout, into_x, into_parameters,
                              stream);
  check_gradient_dtype(op, x.dtype(), {{"d_weight", d_weight}, {"d_bias", d_bias}});
  if (d_x.defined()) {
    check_dtype(op, x.dtype(), {{"d_x", d_x}});
    multiply(op, d_x, {s.rows, s.out, s.in}, {d_out}, {weight, in_out}, {}, into_x, stream);
  }
  if (d_weight.defined() && in_out)
    multiply(op, d_weight, {s.in, s.rows, s.out}, {x, true}, {d_out}, {}, into_parameters, stream);
  else if (d_weight.defined())
    multiply(op, d_weight, {s.out, s.rows, s.in}, {d_out, true}, {x}, {}, into_parameters, stream);
  if (d_bias.defined()) column_sums_of(d_bias, d_out, into_parameters, stream);
}

void linear_gelu(const Tensor& out, const Tensor& pre, const Tensor& x, const Tensor& weight,
                 const Tensor& bias, WeightLayout layout, const Stream& stream) {
  constexpr const char* op = "linear_gelu";
  const Sizes s{all_rows(x), last(x), last(pre)};
  const bool fits = all_rows(pre) == s.rows && out.shape() == pre.shape() && weight_fits(weight, s, layout) &&
                    optional_vector(bias, s.out);
  if (bias.defined())
    check(op, {{"out", out}, {"pre", pre}, {"x", x}, {"weight", weight}, {"bias", bias}}, fits);
  else
    check(op, {{"out", out}, {"pre", pre}, {"x", x}, {"weight", weight}}, fits);
  if (const auto* d = on_device(op, out, stream))
    return d->linear_gelu(out, pre, x, weight, bias, layout, stream);
  linear(pre, x, weight, bias, layout, stream);
  gelu(out, pre, stream);
}

void linear_backward_through_gelu(const Tensor& d_pre, const Tensor& d_out, const Tensor& weight,
                                  const Tensor& pre, WeightLayout layout, const Stream& stream) {
  constexpr const char* op = "linear_backward_through_gelu";
  const Sizes s{all_rows(pre), last(pre), last(d_out)};
  check(op, {{"d_pre", d_pre}, {"d_out", d_out}, {"weight", weight}, {"pre", pre}},
        all_rows(d_out) == s.rows && d_pre.shape() == pre.shape() && weight_fits(weight, s, layout));
  if (const auto* d = on_device(op, d_pre, stream))
    return d->linear_backward_through_gelu(d_pre, d_out, weight, pre, layout, stream);
  linear_backward(d_pre, {}, {}, d_out, pre, weight, layout, Into::overwrite, Into::overwrite, stream);
  gelu_backward(d_pre, d_pre, pre, Into::overwrite, stream);
}

namespace {

/// Elements between the matrices of the last two extents; 0 for a single one.
std::size_t matrix_step(const Tensor& t) { return t.shape().dims() > 2 ? t.shape()[-2] * t.row_stride() : 0; }

/// Products of matrices of the last two extents.
void multiply_each(const Tensor& out, const Sizes& s, const Operand& a, const Operand& b, Into into,
                   const Stream& stream) {
  const kernels::Batch batch{out.count() / (s.rows * s.out), matrix_step(a.tensor), matrix_step(b.tensor),
                             matrix_step(out)};
  const DType factors = a.tensor.dtype();
  check_product("matmul", out, factors, b.tensor.dtype());
  if (factors == DType::f32)
    return kernels::gemm(out.data<float>(), out.row_stride(), s.rows, s.out, s.in, matrix(a), matrix(b),
                         into == Into::accumulate ? 1 : 0, batch, stream);
  const auto product = [&](std::size_t i, const Stream& on) {
    Matrix16 x = matrix16(a), y = matrix16(b);
    x.data += i * batch.a_step, y.data += i * batch.b_step;
    kernels::gemm_16bit({.m = s.rows,
                         .n = s.out,
                         .k = s.in,
                         .factors = factors,
                         .a = x,
                         .b = y,
                         .c = out.raw() + i * batch.c_step * size_of(out.dtype()),
                         .result = out.dtype(),
                         .c_stride = out.row_stride(),
                         .accumulate = into == Into::accumulate},
                        on);
  };
  const bool shared = batch.is_shared(s.rows, s.out, s.in);
  const auto products = [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) product(i, shared ? Stream() : stream);
  };
  shared ? stream.parallel_for(batch.count, 1, products) : products(0, batch.count);
}

/// The extents before the last two are those of `out`, or there are none.
bool repeats(const Tensor& factor, const Tensor& out) {
  const Shape &f = factor.shape(), &all = out.shape();
  bool same = f.dims() == all.dims();
  for (int d = 0; same && d < f.dims() - 2; ++d) same = f[d] == all[d];
  return f.dims() == 2 || same;
}

}  // namespace

void matmul(const Tensor& out, const Tensor& a, bool transpose_a, const Tensor& b, bool transpose_b,
            Into into, const Stream& stream) {
  const auto extent = [](const Tensor& t, int i) { return t.shape().dims() >= 2 ? t.shape()[i - 2] : 0; };
  const Sizes s{extent(a, transpose_a), extent(a, !transpose_a), extent(b, !transpose_b)};
  check("matmul", {{"out", out}, {"a", a}, {"b", b}},
        out.shape().dims() >= 2 && a.shape().dims() >= 2 && b.shape().dims() >= 2 &&
            extent(b, transpose_b) == s.in && extent(out, 0) == s.rows && extent(out, 1) == s.out &&
            repeats(a, out) && repeats(b, out) &&
            (out.shape().dims() == 2 || a.shape().dims() > 2 || b.shape().dims() > 2),
        Rows::any_stride);
  if (out.count() == 0) return;
  if (out.shape().dims() > 2 && b.shape().dims() == 2 && !transpose_a)  // one product of all rows
    return matmul(out.reshape({all_rows(out), s.out}), a.reshape({all_rows(a), s.in}), false, b, transpose_b,
                  into, stream);
  if (const auto* d = on_device("matmul", out, stream))
    return d->matmul(out, a, transpose_a, b, transpose_b, into, stream);
  if (out.shape().dims() > 2) return multiply_each(out, s, {a, transpose_a}, {b, transpose_b}, into, stream);
  multiply("matmul", out, s, {a, transpose_a}, {b, transpose_b}, {}, into, stream);
}

}  // namespace ops
}  // namespace rz
