// Layer norm, and RMS norm: the same with a mean of 0, without bias. Statistics in double, in two passes over
// a row that stays in L1. Backward, with n the normalized values and g = d_out · weight: d_x =
// inverse_deviation · (g - mean(g) - n · mean(g n)), for RMS norm without mean(g).

#include "tensor/ops.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tensor/kernels/normalization/norm.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <cmath>

#include "tensor/kernels/check.h"
#include "tensor/kernels/column_sum.h"
#include "tensor/kernels/device_ops.h"
#include "tensor/kernels/vector-inl.h"

#ifndef RZ_NORM_ROW
#define RZ_NORM_ROW
namespace rz::ops {
enum class Norm : bool { layer, rms };
struct Statistics {
  float mean, inverse_deviation;  ///< from 0 for RMS norm, whose mean is 0
};
}  // namespace rz::ops
#endif

HWY_BEFORE_NAMESPACE();
namespace rz {
namespace HWY_NAMESPACE {

void add_rows(const Tensor& out, const Tensor& a, const Tensor& b, std::size_t begin, std::size_t end) {
  map_range(
      begin, end, [](auto x, auto y) HWY_ATTR { return hn::Add(x, y); }, out, a, b);
}

/// RMS norm if `bias` is null.
template <class T>
ops::Statistics normalise_row(T* out, const T* x, const T* weight, const T* bias, std::size_t n,
                              double epsilon) {
  const Floats d;
  const Doubles dd;
  double mean = 0;
  if (bias)
    mean = sum(
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
  for (std::size_t i = whole; i < n; ++i) squares += (to_f32(x[i]) - mean) * (to_f32(x[i]) - mean);
  const double inverse = 1 / std::sqrt(squares / static_cast<double>(n) + epsilon);
  const auto m = static_cast<float>(mean), r = static_cast<float>(inverse);
  const auto normal = [&](auto v, auto w, auto b) HWY_ATTR {
    return hn::Add(hn::Mul(hn::Mul(hn::Sub(v, hn::Set(d, m)), hn::Set(d, r)), w), b);
  };
  const auto scaled = [&](auto v, auto w) HWY_ATTR { return hn::Mul(hn::Mul(v, hn::Set(d, r)), w); };
  if (bias)
    map(out, n, normal, x, weight, bias);
  else
    map(out, n, scaled, x, weight);
  return {m, r};
}

ops::Statistics normalise(const Tensor& out, const Tensor& x, const Tensor& weight, const Tensor& bias,
                          std::size_t row, double epsilon) {
  ops::Statistics s{};
  ops::dispatch_dtype(x.dtype(), [&](auto t) HWY_ATTR {
    using T = decltype(t);
    const std::size_t n = weight.count();
    s = normalise_row<T>(elements<T>(out) + row * n, elements<T>(x) + row * n, elements<T>(weight),
                         elements<T>(bias), n, epsilon);
  });
  return s;
}

template <class T>
void normalise_row_backward(T* d_x, const T* d_out, const T* x, const T* weight, std::size_t n,
                            ops::Norm norm, ops::Statistics s, bool accumulate) {
  const Doubles dd;
  const auto centre = hn::Set(dd, s.mean), inverse = hn::Set(dd, s.inverse_deviation);
  const double count = static_cast<double>(n);
  double mean_g = 0;
  if (norm == ops::Norm::layer)
    mean_g = sum(
                 n, [](auto dy, auto w) HWY_ATTR { return hn::Mul(dy, w); }, d_out, weight) /
             count;
  const auto product = [&](auto dy, auto w, auto v)
                           HWY_ATTR { return hn::Mul(hn::Mul(dy, w), hn::Mul(hn::Sub(v, centre), inverse)); };
  const double mean_gn = sum(n, product, d_out, weight, x) / count;
  const Floats d;
  const auto g = hn::Set(d, static_cast<float>(mean_g)), gn = hn::Set(d, static_cast<float>(mean_gn));
  const auto m = hn::Set(d, s.mean), r = hn::Set(d, s.inverse_deviation);
  const auto gradient = [&](auto dy, auto w, auto v) HWY_ATTR {
    const auto along_n = hn::Mul(hn::Mul(hn::Sub(v, m), r), gn);
    return hn::Mul(r, hn::Sub(hn::Sub(hn::Mul(dy, w), g), along_n));
  };
  map_into(accumulate, d_x, n, gradient, d_out, weight, x);
}

void normalise_backward(const Tensor& d_x, const Tensor& d_out, const Tensor& x, const Tensor& weight,
                        std::size_t row, ops::Norm norm, ops::Statistics s, bool accumulate) {
  ops::dispatch_dtype(x.dtype(), [&](auto t) HWY_ATTR {
    using T = decltype(t);
    const std::size_t n = weight.count(), at = row * n;
    normalise_row_backward<T>(elements<T>(d_x) + at, elements<T>(d_out) + at, elements<T>(x) + at,
                              elements<T>(weight), n, norm, s, accumulate);
  });
}

/// Elements [at, at + n).
void add_weight_gradient(const Tensor& d_out, const Tensor& x, std::size_t at, std::size_t n,
                         ops::Statistics s, double* HWY_RESTRICT sums) {
  ops::dispatch_dtype(x.dtype(), [&](auto t) HWY_ATTR {
    using T = decltype(t);
    const T *const dy = elements<T>(d_out) + at, *const v = elements<T>(x) + at;
    const HalfFloats h;
    const auto m = hn::Set(h, s.mean), r = hn::Set(h, s.inverse_deviation);
    const auto product = [&](auto g, auto x) HWY_ATTR { return hn::Mul(g, hn::Mul(hn::Sub(x, m), r)); };
    add_to_sums(sums, n, product, dy, v);
  });
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

namespace ops {

namespace {

constexpr std::size_t grain = 4;  // rows

/// `first(row)` is called before the row is read. RMS norm has neither mean nor bias.
template <class F>
void normalise_rows(const char* op, const Tensor& out, const Tensor& mean, const Tensor& inverse_deviation,
                    const Tensor& x, const Tensor& weight, const Tensor& bias, float epsilon,
                    const Stream& stream, const F& first) {
  check_dtype(op, x.dtype(), {{"out", out}, {"weight", weight}, {"bias", bias}});
  float *m = mean.defined() ? mean.data<float>() : nullptr, *r = inverse_deviation.data<float>();
  stream.parallel_for(rows(x), grain, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
      first(i);
      const Statistics s = HWY_DYNAMIC_DISPATCH(normalise)(out, x, weight, bias, i, epsilon);
      if (m) m[i] = s.mean;
      r[i] = s.inverse_deviation;
    }
  });
}

constexpr auto nothing_first = [](std::size_t) {};

/// Writes sum = a + b, row by row.
auto add_first(const Tensor& sum, const Tensor& a, const Tensor& b) {
  return [&, c = last(sum)](std::size_t row) {
    HWY_DYNAMIC_DISPATCH(add_rows)(sum, a, b, row * c, (row + 1) * c);
  };
}

/// RMS norm if `mean` is undefined.
void rows_backward(const char* op, const Tensor& d_x, const Tensor& d_weight, const Tensor& d_bias,
                   const Tensor& d_out, const Tensor& x, const Tensor& weight, const Tensor& mean,
                   const Tensor& inverse_deviation, Into into_x, Into into_parameters, const Stream& stream) {
  check_dtype(op, x.dtype(), {{"d_x", d_x}, {"d_out", d_out}, {"weight", weight}});
  const Norm norm = mean.defined() ? Norm::layer : Norm::rms;
  const float *const m = mean.defined() ? mean.data<float>() : nullptr, *const r =
                                                                            inverse_deviation.data<float>();
  const auto statistics = [=](std::size_t row) { return Statistics{m ? m[row] : 0, r[row]}; };
  const std::size_t n = rows(x), c = last(x);
  // The sums first, since d_x may alias d_out.
  if (d_weight.defined())
    column_sums(d_weight, n, into_parameters, stream,
                [&](std::size_t row, std::size_t first, std::size_t count, double* sums) {
                  HWY_DYNAMIC_DISPATCH(add_weight_gradient)
                  (d_out, x, row * c + first, count, statistics(row), sums);
                });
  if (d_bias.defined()) column_sums_of(d_bias, d_out, into_parameters, stream);
  stream.parallel_for(n, grain, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) HWY_DYNAMIC_DISPATCH(normalise_backward)
    (d_x, d_out, x, weight, i, norm, statistics(i), into_x == Into::accumulate);
  });
}

}  // namespace

void layer_norm(const Tensor& out, const Tensor& mean, const Tensor& inverse_deviation, const Tensor& x,
                const Tensor& weight, const Tensor& bias, float epsilon, const Stream& stream) {
  const std::size_t n = rows(x), c = last(x);
  check_norm("layer_norm", out, mean, inverse_deviation, x, weight, bias, c,
             out.count() == n * c && mean.count() == n && inverse_deviation.count() == n);
  if (const auto* d = on_device("layer_norm", out, stream))
    return d->layer_norm(out, mean, inverse_deviation, x, weight, bias, epsilon, stream);
  normalise_rows("layer_norm", out, mean, inverse_deviation, x, weight, bias, epsilon, stream, nothing_first);
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
  check_dtype("add_layer_norm", sum.dtype(), {{"a", a}, {"b", b}});
  normalise_rows("add_layer_norm", out, mean, inverse_deviation, sum, weight, bias, epsilon, stream,
                 add_first(sum, a, b));
}

void layer_norm_backward(const Tensor& d_x, const Tensor& d_weight, const Tensor& d_bias, const Tensor& d_out,
                         const Tensor& x, const Tensor& weight, const Tensor& mean,
                         const Tensor& inverse_deviation, Into into_x, Into into_parameters,
                         const Stream& stream) {
  constexpr const char* op = "layer_norm_backward";
  const std::size_t n = rows(x), c = last(x);
  check_norm_backward(
      op, d_x, d_out, x, weight, mean, inverse_deviation, c,
      d_x.count() == n * c && d_out.count() == n * c && mean.count() == n && inverse_deviation.count() == n);
  check_norm_gradients(op, d_weight, d_bias, x, c);
  if (const auto* d = on_device(op, d_x, stream))
    return d->layer_norm_backward(d_x, d_weight, d_bias, d_out, x, weight, mean, inverse_deviation, into_x,
                                  into_parameters, stream);
  rows_backward(op, d_x, d_weight, d_bias, d_out, x, weight, mean, inverse_deviation, into_x, into_parameters,
                stream);
}

void rms_norm(const Tensor& out, const Tensor& inverse_rms, const Tensor& x, const Tensor& weight,
              float epsilon, const Stream& stream) {
  const std::size_t n = rows(x), c = last(x);
  check("rms_norm", {{"out", out}, {"inverse_rms", inverse_rms}, {"x", x}, {"weight", weight}},
        out.count() == n * c && inverse_rms.count() == n && is_vector(weight, c));
  if (const auto* d = on_device("rms_norm", out, stream))
    return d->rms_norm(out, inverse_rms, x, weight, epsilon, stream);
  normalise_rows("rms_norm", out, {}, inverse_rms, x, weight, {}, epsilon, stream, nothing_first);
}

void add_rms_norm(const Tensor& sum, const Tensor& out, const Tensor& inverse_rms, const Tensor& a,
                  const Tensor& b, const Tensor& weight, float epsilon, const Stream& stream) {
  const std::size_t n = rows(sum), c = last(sum);
  check("add_rms_norm",
        {{"sum", sum}, {"out", out}, {"inverse_rms", inverse_rms}, {"a", a}, {"b", b}, {"weight", weight}},
        out.count() == n * c && a.count() == n * c && b.count() == n * c && inverse_rms.count() == n &&
            is_vector(weight, c));
  if (const auto* d = on_device("add_rms_norm", sum, stream))
    return d->add_rms_norm(sum, out, inverse_rms, a, b, weight, epsilon, stream);
  check_dtype("add_rms_norm", sum.dtype(), {{"a", a}, {"b", b}});
  normalise_rows("add_rms_norm", out, {}, inverse_rms, sum, weight, {}, epsilon, stream,
                 add_first(sum, a, b));
}

void rms_norm_backward(const Tensor& d_x, const Tensor& d_weight, const Tensor& d_out, const Tensor& x,
                       const Tensor& weight, const Tensor& inverse_rms, Into into_x, Into into_weight,
                       const Stream& stream) {
  constexpr const char* op = "rms_norm_backward";
  const std::size_t n = rows(x), c = last(x);
  check(op, {{"d_x", d_x}, {"d_out", d_out}, {"x", x}, {"weight", weight}, {"inverse_rms", inverse_rms}},
        d_x.count() == n * c && d_out.count() == n * c && is_vector(weight, c) && inverse_rms.count() == n);
  check_norm_gradients(op, d_weight, {}, x, c);
  if (const auto* d = on_device(op, d_x, stream))
    return d->rms_norm_backward(d_x, d_weight, d_out, x, weight, inverse_rms, into_x, into_weight, stream);
  rows_backward(op, d_x, d_weight, {}, d_out, x, weight, {}, inverse_rms, into_x, into_weight, stream);
}

}  // namespace ops
}  // namespace rz
#endif
