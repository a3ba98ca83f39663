#include "tensor/ops.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tensor/kernels/linear.cpp"
#include "tensor/kernels/targets.h"
// after the targets
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <cstring>

#include "tensor/kernels/check.h"
#include "tensor/kernels/column_sum.h"
#include "tensor/kernels/device_ops.h"
#include "tensor/kernels/gemm.h"

HWY_BEFORE_NAMESPACE();
namespace rz {
namespace HWY_NAMESPACE {

void add_row(const float* HWY_RESTRICT row, std::size_t count, double* HWY_RESTRICT sums) {
  for (std::size_t j = 0; j < count; ++j) sums[j] += row[j];
}

}  // namespace HWY_NAMESPACE
}  // namespace rz
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace rz {

HWY_EXPORT(add_row);

namespace ops {

namespace {

using kernels::gemm;
using kernels::Matrix;

struct Sizes {
  std::size_t rows, in, out;
};

bool weight_fits(const Tensor& weight, const Sizes& s, WeightLayout layout) {
  return weight.shape() == (layout == WeightLayout::in_out ? Shape{s.in, s.out} : Shape{s.out, s.in});
}

void copy_to_rows(float* out, std::size_t rows, const Tensor& bias, const Stream& stream) {
  const std::size_t n = bias.count();
  const float* b = bias.data<float>();
  stream.parallel_for(rows, 8, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) std::memcpy(out + i * n, b, n * sizeof(float));
  });
}

void bias_gradient(const Tensor& d_bias, const Tensor& d_out, const Sizes& s, Into into,
                   const Stream& stream) {
  const float* dy = d_out.data<float>();
  column_sums(d_bias.data<float>(), s.rows, s.out, into, stream,
              [&](std::size_t row, std::size_t first, std::size_t count, double* sums) {
                HWY_DYNAMIC_DISPATCH(add_row)(dy + row * s.out + first, count, sums);
              });
}

}  // namespace

// Starts the product from the bias, at no cost: without it the BLAS would set `out` to 0 and then add.
void linear(const Tensor& out, const Tensor& x, const Tensor& weight, const Tensor& bias, WeightLayout layout,
            const Stream& stream) {
  const Sizes s{rows(x), last(x), last(out)};
  const bool fits = rows(out) == s.rows && weight_fits(weight, s, layout) && optional_vector(bias, s.out);
  if (bias.defined())
    check("linear", {{"out", out}, {"x", x}, {"weight", weight}, {"bias", bias}}, fits);
  else
    check("linear", {{"out", out}, {"x", x}, {"weight", weight}}, fits);
  if (const auto* d = on_device("linear", out, stream))
    return d->linear(out, x, weight, bias, layout, stream);

  float* o = out.data<float>();
  if (bias.defined()) copy_to_rows(o, s.rows, bias, stream);
  gemm(o, s.out, s.rows, s.out, s.in, 1, {x.data<float>(), s.in},
       {weight.data<float>(), last(weight), layout == WeightLayout::out_in}, bias.defined() ? 1 : 0, stream);
}

void linear_backward(const Tensor& d_x, const Tensor& d_weight, const Tensor& d_bias, const Tensor& d_out,
                     const Tensor& x, const Tensor& weight, WeightLayout layout, Into into_x,
                     Into into_parameters, const Stream& stream) {
  constexpr const char* op = "linear_backward";
  const Sizes s{rows(x), last(x), last(d_out)};
  const bool in_out = layout == WeightLayout::in_out;
  check(op, {{"d_out", d_out}, {"x", x}, {"weight", weight}},
        rows(d_out) == s.rows && weight_fits(weight, s, layout));
  if (d_x.defined()) check(op, {{"d_x", d_x}, {"x", x}}, d_x.count() == x.count());
  if (d_weight.defined())
    check(op, {{"d_weight", d_weight}, {"weight", weight}}, d_weight.shape() == weight.shape());
  if (d_bias.defined()) check(op, {{"d_bias", d_bias}, {"d_out", d_out}}, is_vector(d_bias, s.out));
  if (const auto* d = on_device("linear_backward", d_out, stream))
    return d->linear_backward(d_x, d_weight, d_bias, d_out, x, weight, layout, into_x, into_parameters,
                              stream);

  const float* dy = d_out.data<float>();
  const auto beta = [](Into into) { return into == Into::accumulate ? 1.0f : 0.0f; };
  if (d_x.defined())
    gemm(d_x.data<float>(), s.in, s.rows, s.in, s.out, 1, {dy, s.out},
         {weight.data<float>(), last(weight), in_out}, beta(into_x), stream);
  if (d_weight.defined()) {
    const Matrix a = in_out ? Matrix{x.data<float>(), s.in, true} : Matrix{dy, s.out, true};
    const Matrix b = in_out ? Matrix{dy, s.out} : Matrix{x.data<float>(), s.in};
    gemm(d_weight.data<float>(), last(weight), in_out ? s.in : s.out, last(weight), s.rows, 1, a, b,
         beta(into_parameters), stream);
  }
  if (d_bias.defined()) bias_gradient(d_bias, d_out, s, into_parameters, stream);
}

void linear_gelu(const Tensor& out, const Tensor& pre, const Tensor& x, const Tensor& weight,
                 const Tensor& bias, WeightLayout layout, const Stream& stream) {
  constexpr const char* op = "linear_gelu";
  const Sizes s{rows(x), last(x), last(pre)};
  const bool fits = rows(pre) == s.rows && out.shape() == pre.shape() && weight_fits(weight, s, layout) &&
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
  const Sizes s{rows(pre), last(pre), last(d_out)};
  check(op, {{"d_pre", d_pre}, {"d_out", d_out}, {"weight", weight}, {"pre", pre}},
        rows(d_out) == s.rows && d_pre.shape() == pre.shape() && weight_fits(weight, s, layout));
  if (const auto* d = on_device(op, d_pre, stream))
    return d->linear_backward_through_gelu(d_pre, d_out, weight, pre, layout, stream);
  linear_backward(d_pre, {}, {}, d_out, pre, weight, layout, Into::overwrite, Into::overwrite, stream);
  gelu_backward(d_pre, d_pre, pre, Into::overwrite, stream);
}

void matmul(const Tensor& out, const Tensor& a, bool transpose_a, const Tensor& b, bool transpose_b,
            Into into, const Stream& stream) {
  const auto extent = [](const Tensor& t, int i) { return t.shape().dims() == 2 ? t.shape()[i] : 0; };
  const std::size_t m = extent(a, transpose_a), k = extent(a, !transpose_a), n = extent(b, !transpose_b);
  check("matmul", {{"out", out}, {"a", a}, {"b", b}},
        a.shape().dims() == 2 && b.shape().dims() == 2 && extent(b, transpose_b) == k &&
            out.shape() == Shape{m, n});
  if (const auto* d = on_device("matmul", out, stream))
    return d->matmul(out, a, transpose_a, b, transpose_b, into, stream);
  gemm(out.data<float>(), n, m, n, k, 1, {a.data<float>(), last(a), transpose_a},
       {b.data<float>(), last(b), transpose_b}, into == Into::accumulate ? 1 : 0, stream);
}

}  // namespace ops
}  // namespace rz
#endif
