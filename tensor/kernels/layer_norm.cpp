// Statistics in double, in two passes over a row that stays in L1. Backward, with n the normalized values and
// g = d_out · weight: d_x = inverse_deviation · (g - mean(g) - n · mean(g n)).

#include "tensor/ops.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tensor/kernels/layer_norm.cpp"
#include "tensor/kernels/targets.h"
// after the targets
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <cmath>

#include "tensor/kernels/check.h"
#include "tensor/kernels/column_sum.h"
#include "tensor/kernels/device_ops.h"
#include "tensor/kernels/vector-inl.h"

#ifndef RZ_LAYER_NORM_ROW
#define RZ_LAYER_NORM_ROW
namespace rz::ops {
struct Statistics {
  float mean, inverse_deviation;
};
}  // namespace rz::ops
#endif

HWY_BEFORE_NAMESPACE();
namespace rz {
namespace HWY_NAMESPACE {

void add_rows(float* out, const float* a, const float* b, std::size_t n) {
  RZ_EACH(i, 0, n) out[i] = a[i] + b[i];
}

ops::Statistics normalise(float* out, const float* x, const float* weight, const float* bias, std::size_t n,
                          double epsilon) {
  const Doubles dd;
  const double mean = sum(
                          n, [](auto v) HWY_ATTR { return v; }, x) /
                      static_cast<double>(n);
  // Sums the squared deviations: Σx(x - 2 mean) + n mean² would cancel.
  const auto centre = hn::Set(dd, mean);
  const std::size_t lanes = hn::Lanes(dd), whole = n / lanes * lanes;
  double squares = sum(
      whole,
      [&](auto v) HWY_ATTR {
        const auto deviation = hn::Sub(v, centre);
        return hn::Mul(deviation, deviation);
      },
      x);
  for (std::size_t i = whole; i < n; ++i) squares += (x[i] - mean) * (x[i] - mean);
  const double inverse = 1 / std::sqrt(squares / static_cast<double>(n) + epsilon);
  const auto m = static_cast<float>(mean), r = static_cast<float>(inverse);
  RZ_EACH(i, 0, n) out[i] = (x[i] - m) * r * weight[i] + bias[i];
  return {m, r};
}

void normalise_backward(float* d_x, const float* d_out, const float* x, const float* weight, std::size_t n,
                        ops::Statistics s, bool accumulate) {
  const Doubles dd;
  const auto centre = hn::Set(dd, s.mean), inverse = hn::Set(dd, s.inverse_deviation);
  const double count = static_cast<double>(n);
  const double mean_g = sum(
                            n, [](auto dy, auto w) HWY_ATTR { return hn::Mul(dy, w); }, d_out, weight) /
                        count;
  const auto product = [&](auto dy, auto w, auto v)
                           HWY_ATTR { return hn::Mul(hn::Mul(dy, w), hn::Mul(hn::Sub(v, centre), inverse)); };
  const double mean_gn = sum(n, product, d_out, weight, x) / count;
  const auto g = static_cast<float>(mean_g), gn = static_cast<float>(mean_gn);
  const float m = s.mean, r = s.inverse_deviation;
  if (accumulate)
    RZ_EACH(i, 0, n) d_x[i] += r * (d_out[i] * weight[i] - g - (x[i] - m) * r * gn);
  else
    RZ_EACH(i, 0, n) d_x[i] = r * (d_out[i] * weight[i] - g - (x[i] - m) * r * gn);
}

void add_weight_gradient(const float* HWY_RESTRICT d_out, const float* HWY_RESTRICT x, std::size_t n,
                         ops::Statistics s, double* HWY_RESTRICT sums) {
  for (std::size_t j = 0; j < n; ++j) sums[j] += d_out[j] * ((x[j] - s.mean) * s.inverse_deviation);
}

void add_bias_gradient(const float* HWY_RESTRICT d_out, std::size_t n, double* HWY_RESTRICT sums) {
  for (std::size_t j = 0; j < n; ++j) sums[j] += d_out[j];
}

}  // namespace HWY_NAMESPACE
}  // namespace rz
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace rz {

HWY_EXPORT(add_rows);
HWY_EXPORT(normalise);
HWY_EXPORT(normalise_backward);
HWY_EXPORT(add_weight_gradient);
HWY_EXPORT(add_bias_gradient);

namespace ops {

namespace {

constexpr std::size_t grain = 4;  // rows

/// `first(row)` is called before the row is read.
template <class F>
void normalise_rows(const Tensor& out, const Tensor& mean, const Tensor& inverse_deviation, const Tensor& x,
                    const Tensor& weight, const Tensor& bias, float epsilon, const Stream& stream,
                    const F& first) {
  const std::size_t c = last(x);
  float *o = out.data<float>(), *m = mean.data<float>(), *r = inverse_deviation.data<float>();
  const float *v = x.data<float>(), *w = weight.data<float>(), *b = bias.data<float>();
  stream.parallel_for(rows(x), grain, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
      first(i);
      const Statistics s = HWY_DYNAMIC_DISPATCH(normalise)(o + i * c, v + i * c, w, b, c, epsilon);
      m[i] = s.mean, r[i] = s.inverse_deviation;
    }
  });
}

}  // namespace

void layer_norm(const Tensor& out, const Tensor& mean, const Tensor& inverse_deviation, const Tensor& x,
                const Tensor& weight, const Tensor& bias, float epsilon, const Stream& stream) {
  const std::size_t n = rows(x), c = last(x);
  check("layer_norm",
        {{"out", out},
         {"mean", mean},
         {"inverse_deviation", inverse_deviation},
         {"x", x},
         {"weight", weight},
         {"bias", bias}},
        out.count() == n * c && mean.count() == n && inverse_deviation.count() == n && is_vector(weight, c) &&
            is_vector(bias, c));
  if (const auto* d = on_device("layer_norm", out, stream))
    return d->layer_norm(out, mean, inverse_deviation, x, weight, bias, epsilon, stream);
  normalise_rows(out, mean, inverse_deviation, x, weight, bias, epsilon, stream, [](std::size_t) {});
}

void add_layer_norm(const Tensor& sum, const Tensor& out, const Tensor& mean, const Tensor& inverse_deviation,
                    const Tensor& a, const Tensor& b, const Tensor& weight, const Tensor& bias, float epsilon,
                    const Stream& stream) {
  const std::size_t n = rows(sum), c = last(sum);
  check("add_layer_norm",
        {{"sum", sum},
         {"out", out},
         {"mean", mean},
         {"inverse_deviation", inverse_deviation},
         {"a", a},
         {"b", b},
         {"weight", weight},
         {"bias", bias}},
        out.count() == n * c && a.count() == n * c && b.count() == n * c && mean.count() == n &&
            inverse_deviation.count() == n && is_vector(weight, c) && is_vector(bias, c));
  if (const auto* d = on_device("add_layer_norm", sum, stream))
    return d->add_layer_norm(sum, out, mean, inverse_deviation, a, b, weight, bias, epsilon, stream);
  float* s = sum.data<float>();
  const float *x = a.data<float>(), *y = b.data<float>();
  normalise_rows(out, mean, inverse_deviation, sum, weight, bias, epsilon, stream, [&](std::size_t i) {
    HWY_DYNAMIC_DISPATCH(add_rows)(s + i * c, x + i * c, y + i * c, c);
  });
}

void layer_norm_backward(const Tensor& d_x, const Tensor& d_weight, const Tensor& d_bias, const Tensor& d_out,
                         const Tensor& x, const Tensor& weight, const Tensor& mean,
                         const Tensor& inverse_deviation, Into into_x, Into into_parameters,
                         const Stream& stream) {
  constexpr const char* op = "layer_norm_backward";
  const std::size_t n = rows(x), c = last(x);
  check(op,
        {{"d_x", d_x},
         {"d_out", d_out},
         {"x", x},
         {"weight", weight},
         {"mean", mean},
         {"inverse_deviation", inverse_deviation}},
        d_x.count() == n * c && d_out.count() == n * c && is_vector(weight, c) && mean.count() == n &&
            inverse_deviation.count() == n);
  if (d_weight.defined()) check(op, {{"d_weight", d_weight}, {"x", x}}, is_vector(d_weight, c));
  if (d_bias.defined()) check(op, {{"d_bias", d_bias}, {"x", x}}, is_vector(d_bias, c));
  if (const auto* d = on_device("layer_norm_backward", d_x, stream))
    return d->layer_norm_backward(d_x, d_weight, d_bias, d_out, x, weight, mean, inverse_deviation, into_x,
                                  into_parameters, stream);

  float* dx = d_x.data<float>();
  const float *dy = d_out.data<float>(), *v = x.data<float>(), *w = weight.data<float>();
  const float *m = mean.data<float>(), *r = inverse_deviation.data<float>();
  // The sums first, since d_x may alias d_out.
  if (d_weight.defined())
    column_sums(d_weight.data<float>(), n, c, into_parameters, stream,
                [&](std::size_t row, std::size_t first, std::size_t count, double* sums) {
                  const std::size_t at = row * c + first;
                  HWY_DYNAMIC_DISPATCH(add_weight_gradient)(dy + at, v + at, count, {m[row], r[row]}, sums);
                });
  if (d_bias.defined())
    column_sums(d_bias.data<float>(), n, c, into_parameters, stream,
                [&](std::size_t row, std::size_t first, std::size_t count, double* sums) {
                  HWY_DYNAMIC_DISPATCH(add_bias_gradient)(dy + row * c + first, count, sums);
                });
  stream.parallel_for(n, grain, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) HWY_DYNAMIC_DISPATCH(normalise_backward)
    (dx + i * c, dy + i * c, v + i * c, w, c, {m[i], r[i]}, into_x == Into::accumulate);
  });
}

}  // namespace ops
}  // namespace rz
#endif
