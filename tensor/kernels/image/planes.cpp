#include "tensor/kernels/image/planes.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tensor/kernels/image/planes.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "tensor/kernels/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace rz {
namespace HWY_NAMESPACE {

using ops::image::NormGradient;
using ops::image::RowNormGradient;
using ops::image::Sums;

void plane_add(float* HWY_RESTRICT sum, const float* HWY_RESTRICT in, std::size_t n) {
  const Floats d;
  const std::size_t lanes = hn::Lanes(d);
  std::size_t i = 0;
  for (; i + lanes <= n; i += lanes)
    hn::StoreU(hn::Add(hn::LoadU(d, sum + i), hn::LoadU(d, in + i)), d, sum + i);
  for (; i < n; ++i) sum[i] += in[i];
}

void plane_store(const Tensor& out, std::size_t at, const float* in, std::size_t n, bool accumulate) {
  ops::dispatch_dtype(out.dtype(), [&](auto t) HWY_ATTR {
    map_into(
        accumulate, elements<decltype(t)>(out) + at, n, [](auto x) HWY_ATTR { return x; }, in);
  });
}

void plane_load(float* out, const Tensor& in, std::size_t at, std::size_t n) {
  ops::dispatch_dtype(in.dtype(), [&](auto t) HWY_ATTR {
    map(
        out, n, [](auto x) HWY_ATTR { return x; }, elements<const decltype(t)>(in) + at);
  });
}

double plane_sum(const Tensor& in, std::size_t at, std::size_t n) {
  double total = 0;
  ops::dispatch_dtype(in.dtype(), [&](auto t) HWY_ATTR {
    total = sum(
        n, [](auto x) HWY_ATTR { return x; }, elements<const decltype(t)>(in) + at);
  });
  return total;
}

Sums plane_moments(const Tensor& x, std::size_t at, std::size_t n) {
  Sums s;
  ops::dispatch_dtype(x.dtype(), [&](auto t) HWY_ATTR {
    const auto* const v = elements<const decltype(t)>(x) + at;
    s.first = sum(
        n, [](auto a) HWY_ATTR { return a; }, v);
    s.second = sum(
        n, [](auto a) HWY_ATTR { return hn::Mul(a, a); }, v);
  });
  return s;
}

double plane_deviations(const Tensor& x, std::size_t at, std::size_t n, double mean) {
  double squares = 0;
  ops::dispatch_dtype(x.dtype(), [&](auto t) HWY_ATTR {
    const auto* const v = elements<const decltype(t)>(x) + at;
    const Doubles dd;
    const auto centre = hn::Set(dd, mean);
    const std::size_t lanes = hn::Lanes(dd), whole = n / lanes * lanes;
    squares = sum(
        whole,
        [&](auto a) HWY_ATTR {
          const auto deviation = hn::Sub(a, centre);
          return hn::Mul(deviation, deviation);
        },
        v);
    for (std::size_t i = whole; i < n; ++i) squares += (to_f32(v[i]) - mean) * (to_f32(v[i]) - mean);
  });
  return squares;
}

Sums plane_gradient_sums(const Tensor& d_out, const Tensor& x, std::size_t at, std::size_t n, float mean,
                         float inverse_deviation) {
  Sums s;
  ops::dispatch_dtype(x.dtype(), [&](auto t) HWY_ATTR {
    using T = decltype(t);
    const T *const dy = elements<const T>(d_out) + at, *const v = elements<const T>(x) + at;
    const Doubles dd;
    const auto m = hn::Set(dd, mean), r = hn::Set(dd, inverse_deviation);
    s.first = sum(
        n, [](auto g) HWY_ATTR { return g; }, dy);
    s.second = sum(
        n, [&](auto g, auto a) HWY_ATTR { return hn::Mul(g, hn::Mul(hn::Sub(a, m), r)); }, dy, v);
  });
  return s;
}

void plane_normalize(const Tensor& out, const Tensor& x, std::size_t at, std::size_t n, float mean,
                     float inverse_deviation, float weight, float bias) {
  const Floats d;
  const auto m = hn::Set(d, mean), r = hn::Set(d, inverse_deviation), w = hn::Set(d, weight),
             b = hn::Set(d, bias);
  map_range(
      at, at + n, [&](auto v) HWY_ATTR { return hn::Add(hn::Mul(hn::Mul(hn::Sub(v, m), r), w), b); }, out, x);
}

void plane_normalize_backward(const Tensor& d_x, const Tensor& d_out, const Tensor& x, std::size_t at,
                              std::size_t n, const NormGradient& a, bool accumulate) {
  const Floats d;
  const auto m = hn::Set(d, a.mean), r = hn::Set(d, a.inverse_deviation), w = hn::Set(d, a.weight),
             g = hn::Set(d, a.g), gn = hn::Set(d, a.gn);
  const auto gradient = [&](auto dy, auto v) HWY_ATTR {
    const auto along_n = hn::Mul(hn::Mul(hn::Sub(v, m), r), gn);
    return hn::Mul(r, hn::Sub(hn::Sub(hn::Mul(dy, w), g), along_n));
  };
  map_range_into(accumulate, at, at + n, gradient, d_x, d_out, x);
}

void plane_scale(const Tensor& d_x, const Tensor& d_out, std::size_t at, std::size_t n, float factor,
                 bool accumulate) {
  const Floats d;
  const auto f = hn::Set(d, factor);
  map_range_into(
      accumulate, at, at + n, [&](auto dy) HWY_ATTR { return hn::Mul(dy, f); }, d_x, d_out);
}

/// sums[i] += f(in[i]…), of vectors of doubles.
template <class F, class... In>
HWY_INLINE void add_doubles(double* HWY_RESTRICT sums, std::size_t n, const F& f, const In*... in) {
  const Doubles d;
  const HalfFloats h;
  const std::size_t lanes = hn::Lanes(d);
  std::size_t i = 0;
  for (; i + lanes <= n; i += lanes)
    hn::StoreU(hn::Add(hn::LoadU(d, sums + i), f(hn::PromoteTo(d, load(h, in + i))...)), d, sums + i);
  if (i == n) return;
  HWY_ALIGN double rest[hn::MaxLanes(d)];
  hn::Store(f(hn::PromoteTo(d, load_part(h, in + i, n - i, 0.0f))...), d, rest);
  for (std::size_t j = 0; i + j < n; ++j) sums[i + j] += rest[j];
}

void row_moments(double* first, double* second, const Tensor& x, std::size_t at, std::size_t n) {
  ops::dispatch_dtype(x.dtype(), [&](auto t) HWY_ATTR {
    const auto* const v = elements<const decltype(t)>(x) + at;
    add_doubles(
        first, n, [](auto a) HWY_ATTR { return a; }, v);
    add_doubles(
        second, n, [](auto a) HWY_ATTR { return hn::Mul(a, a); }, v);
  });
}

void row_gradient_sums(double* first, double* second, const Tensor& d_out, const Tensor& x, std::size_t at,
                       std::size_t n, const float* mean, const float* inverse_deviation) {
  ops::dispatch_dtype(x.dtype(), [&](auto t) HWY_ATTR {
    using T = decltype(t);
    const T *const dy = elements<const T>(d_out) + at, *const v = elements<const T>(x) + at;
    add_doubles(
        first, n, [](auto g) HWY_ATTR { return g; }, dy);
    add_doubles(
        second, n,
        [](auto g, auto a, auto m, auto r) HWY_ATTR { return hn::Mul(g, hn::Mul(hn::Sub(a, m), r)); }, dy, v,
        mean, inverse_deviation);
  });
}

void row_normalize(const Tensor& out, const Tensor& x, std::size_t at, std::size_t n, const float* mean,
                   const float* inverse_deviation, const float* weight, const float* bias) {
  ops::dispatch_dtype(x.dtype(), [&](auto t) HWY_ATTR {
    using T = decltype(t);
    map(
        elements<T>(out) + at, n,
        [](auto v, auto m, auto r, auto w, auto b)
            HWY_ATTR { return hn::Add(hn::Mul(hn::Mul(hn::Sub(v, m), r), w), b); },
        elements<const T>(x) + at, mean, inverse_deviation, weight, bias);
  });
}

void row_normalize_backward(const Tensor& d_x, const Tensor& d_out, const Tensor& x, std::size_t at,
                            std::size_t n, const RowNormGradient& a, bool accumulate) {
  ops::dispatch_dtype(x.dtype(), [&](auto t) HWY_ATTR {
    using T = decltype(t);
    map_into(
        accumulate, elements<T>(d_x) + at, n,
        [](auto dy, auto v, auto m, auto r, auto w, auto g, auto gn) HWY_ATTR {
          const auto along_n = hn::Mul(hn::Mul(hn::Sub(v, m), r), gn);
          return hn::Mul(r, hn::Sub(hn::Sub(hn::Mul(dy, w), g), along_n));
        },
        elements<const T>(d_out) + at, elements<const T>(x) + at, a.mean, a.inverse_deviation, a.weight, a.g,
        a.gn);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace rz
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace rz {

HWY_EXPORT(plane_add);
HWY_EXPORT(plane_store);
HWY_EXPORT(plane_load);
HWY_EXPORT(plane_sum);
HWY_EXPORT(plane_moments);
HWY_EXPORT(plane_deviations);
HWY_EXPORT(plane_gradient_sums);
HWY_EXPORT(plane_normalize);
HWY_EXPORT(plane_normalize_backward);
HWY_EXPORT(plane_scale);
HWY_EXPORT(row_moments);
HWY_EXPORT(row_gradient_sums);
HWY_EXPORT(row_normalize);
HWY_EXPORT(row_normalize_backward);

namespace ops::image {

void add_floats(float* sum, const float* in, std::size_t n) { HWY_DYNAMIC_DISPATCH(plane_add)(sum, in, n); }

void store_floats(const Tensor& out, std::size_t at, const float* in, std::size_t n, Into into) {
  HWY_DYNAMIC_DISPATCH(plane_store)(out, at, in, n, into == Into::accumulate);
}

void load_floats(float* out, const Tensor& in, std::size_t at, std::size_t n) {
  HWY_DYNAMIC_DISPATCH(plane_load)(out, in, at, n);
}

double sum_elements(const Tensor& in, std::size_t at, std::size_t n) {
  return HWY_DYNAMIC_DISPATCH(plane_sum)(in, at, n);
}

void store_number(const Tensor& out, std::size_t at, double value, Into into) {
  dispatch_dtype(out.dtype(), [&](auto t) {
    using T = decltype(t);
    T& to = reinterpret_cast<T*>(out.raw())[at];
    const double before = into == Into::accumulate ? static_cast<double>(to_f32(to)) : 0;
    to = from_f32<T>(static_cast<float>(before + value));
  });
}

double load_number(const Tensor& t, std::size_t at) {
  double value = 0;
  dispatch_dtype(t.dtype(), [&](auto type) {
    value = static_cast<double>(to_f32(reinterpret_cast<const decltype(type)*>(t.raw())[at]));
  });
  return value;
}

Sums sums_of(const Tensor& x, std::size_t at, std::size_t n) {
  return HWY_DYNAMIC_DISPATCH(plane_moments)(x, at, n);
}

double squared_deviations(const Tensor& x, std::size_t at, std::size_t n, double mean) {
  return HWY_DYNAMIC_DISPATCH(plane_deviations)(x, at, n, mean);
}

Sums gradient_sums(const Tensor& d_out, const Tensor& x, std::size_t at, std::size_t n, float mean,
                   float inverse_deviation) {
  return HWY_DYNAMIC_DISPATCH(plane_gradient_sums)(d_out, x, at, n, mean, inverse_deviation);
}

void normalize(const Tensor& out, const Tensor& x, std::size_t at, std::size_t n, float mean,
               float inverse_deviation, float weight, float bias) {
  HWY_DYNAMIC_DISPATCH(plane_normalize)(out, x, at, n, mean, inverse_deviation, weight, bias);
}

void normalize_backward(const Tensor& d_x, const Tensor& d_out, const Tensor& x, std::size_t at,
                        std::size_t n, const NormGradient& a, Into into) {
  HWY_DYNAMIC_DISPATCH(plane_normalize_backward)(d_x, d_out, x, at, n, a, into == Into::accumulate);
}

void scale_gradient(const Tensor& d_x, const Tensor& d_out, std::size_t at, std::size_t n, float factor,
                    Into into) {
  HWY_DYNAMIC_DISPATCH(plane_scale)(d_x, d_out, at, n, factor, into == Into::accumulate);
}

void add_row_sums(double* first, double* second, const Tensor& x, std::size_t at, std::size_t n) {
  HWY_DYNAMIC_DISPATCH(row_moments)(first, second, x, at, n);
}

void add_row_gradient_sums(double* first, double* second, const Tensor& d_out, const Tensor& x,
                           std::size_t at, std::size_t n, const float* mean, const float* inverse_deviation) {
  HWY_DYNAMIC_DISPATCH(row_gradient_sums)(first, second, d_out, x, at, n, mean, inverse_deviation);
}

void normalize_row(const Tensor& out, const Tensor& x, std::size_t at, std::size_t n, const float* mean,
                   const float* inverse_deviation, const float* weight, const float* bias) {
  HWY_DYNAMIC_DISPATCH(row_normalize)(out, x, at, n, mean, inverse_deviation, weight, bias);
}

void normalize_row_backward(const Tensor& d_x, const Tensor& d_out, const Tensor& x, std::size_t at,
                            std::size_t n, const RowNormGradient& a, Into into) {
  HWY_DYNAMIC_DISPATCH(row_normalize_backward)(d_x, d_out, x, at, n, a, into == Into::accumulate);
}

}  // namespace ops::image
}  // namespace rz
#endif
