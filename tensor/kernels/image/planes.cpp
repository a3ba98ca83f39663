#include "tensor/kernels/image/planes.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tensor/kernels/image/planes.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "tensor/kernels/logarithm-inl.h"
#include "tensor/kernels/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace rz {
namespace HWY_NAMESPACE {

using ops::image::NormGradient;
using ops::image::RowNormGradient;
using ops::image::Sums;

/// map_into() where rows of a plane are short: the last vector, of which a part overlaps the one before it,
/// is computed first, since the output may be an input.
template <class Out, class F, class... In>
HWY_INLINE void map_plane(bool accumulate, Out* out, std::size_t n, const F& f, const In*... in) {
  const Floats d;
  const std::size_t lanes = hn::Lanes(d);
  if (n < lanes) return map_into(accumulate, out, n, f, in...);
  const std::size_t last = n - lanes;
  const auto value = [&](std::size_t i) HWY_ATTR {
    const FloatVector y = f(load(d, in + i)...);
    return accumulate ? hn::Add(load(d, static_cast<const Out*>(out) + i), y) : y;
  };
  const FloatVector end = value(last);
  for (std::size_t i = 0; i < last; i += lanes) store(value(i), d, out + i);
  store(end, d, out + last);
}

/// map_plane() on elements [at, at + n) of tensors of one dtype.
template <class F, class... In>
HWY_INLINE void map_planes(bool accumulate, std::size_t at, std::size_t n, const F& f, const Tensor& out,
                           const In&... in) {
  ops::dispatch_dtype(out.dtype(), [&](auto t) HWY_ATTR {
    using T = decltype(t);
    map_plane(accumulate, elements<T>(out) + at, n, f, (elements<const T>(in) + at)...);
  });
}

/// Σ first(in[i]…) and Σ second(in[i]…), each as sum() adds.
template <class First, class Second, class... In>
HWY_INLINE Sums two_sums(std::size_t n, const First& first, const Second& second, const In*... in) {
  const Doubles d;
  const HalfFloats h;
  const std::size_t lanes = hn::Lanes(d);
  DoubleVector even = hn::Zero(d), odd = even, even2 = even, odd2 = even;
  const auto add = [&](DoubleVector& a, DoubleVector& b, auto... x)
                       HWY_ATTR { a = hn::Add(a, first(x...)), b = hn::Add(b, second(x...)); };
  std::size_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    add(even, even2, hn::PromoteTo(d, load(h, in + i))...);
    add(odd, odd2, hn::PromoteTo(d, load(h, in + i + lanes))...);
  }
  for (; i < n; i += lanes) {
    const std::size_t left = n - i;
    if (left < lanes)
      add(even, even2, hn::PromoteTo(d, load_part(h, in + i, left, 0.0f))...);
    else
      add(even, even2, hn::PromoteTo(d, load(h, in + i))...);
  }
  return {hn::GetLane(hn::SumOfLanes(d, hn::Add(even, odd))),
          hn::GetLane(hn::SumOfLanes(d, hn::Add(even2, odd2)))};
}

/// The same functions of f32 vectors: four vectors are added in f32, and these sums in double. The number of
/// elements that the last vector lacks are `pad`.
template <class First, class Second, class... In>
HWY_INLINE Sums two_sums_of_blocks(std::size_t n, float pad, const First& first, const Second& second,
                                   const In*... in) {
  const Floats d;
  const Doubles dd;
  const std::size_t lanes = hn::Lanes(d);
  DoubleVector lower = hn::Zero(dd), upper = lower, lower2 = lower, upper2 = lower;
  const auto add = [&](FloatVector a, FloatVector b) HWY_ATTR {
    lower = hn::Add(lower, lower_half(a)), upper = hn::Add(upper, upper_half(a));
    lower2 = hn::Add(lower2, lower_half(b)), upper2 = hn::Add(upper2, upper_half(b));
  };
  std::size_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes) {
    const auto four = [&](const auto& f) HWY_ATTR {
      return hn::Add(hn::Add(f(load(d, in + i)...), f(load(d, in + i + lanes)...)),
                     hn::Add(f(load(d, in + i + 2 * lanes)...), f(load(d, in + i + 3 * lanes)...)));
    };
    add(four(first), four(second));
  }
  for (; i + lanes <= n; i += lanes) add(first(load(d, in + i)...), second(load(d, in + i)...));
  if (i < n) add(first(load_part(d, in + i, n - i, pad)...), second(load_part(d, in + i, n - i, pad)...));
  return {hn::GetLane(hn::SumOfLanes(dd, hn::Add(lower, upper))),
          hn::GetLane(hn::SumOfLanes(dd, hn::Add(lower2, upper2)))};
}

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
    s = two_sums(
        n, [](auto a) HWY_ATTR { return a; }, [](auto a) HWY_ATTR { return hn::Mul(a, a); },
        elements<const decltype(t)>(x) + at);
  });
  return s;
}

Sums plane_gradient_sums(const Tensor& d_out, const Tensor& x, std::size_t at, std::size_t n, float mean,
                         float inverse_deviation) {
  Sums s;
  ops::dispatch_dtype(x.dtype(), [&](auto t) HWY_ATTR {
    using T = decltype(t);
    const Doubles dd;
    const auto m = hn::Set(dd, static_cast<double>(mean)),
               r = hn::Set(dd, static_cast<double>(inverse_deviation));
    s = two_sums(
        n, [](auto g, auto) HWY_ATTR { return g; },
        [&](auto g, auto a) HWY_ATTR { return hn::Mul(g, hn::Mul(hn::Sub(a, m), r)); },
        elements<const T>(d_out) + at, elements<const T>(x) + at);
  });
  return s;
}

Sums plane_centred_moments(const Tensor& x, std::size_t at, std::size_t n, float centre) {
  Sums s;
  ops::dispatch_dtype(x.dtype(), [&](auto t) HWY_ATTR {
    const auto c = hn::Set(Floats(), centre);
    s = two_sums_of_blocks(
        n, centre, [&](auto a) HWY_ATTR { return hn::Sub(a, c); },
        [&](auto a) HWY_ATTR { return hn::Mul(hn::Sub(a, c), hn::Sub(a, c)); },
        elements<const decltype(t)>(x) + at);
  });
  return s;
}

void group_gradient_sums(Sums* sums, const Tensor& d_out, const Tensor& x, std::size_t at, std::size_t n,
                         std::size_t planes, float mean, float inverse_deviation) {
  ops::dispatch_dtype(x.dtype(), [&](auto t) HWY_ATTR {
    using T = decltype(t);
    const T *const dy = elements<const T>(d_out) + at, *const v = elements<const T>(x) + at;
    const auto m = hn::Set(Floats(), mean);
    for (std::size_t plane = 0; plane < planes; ++plane) {
      sums[plane] = two_sums_of_blocks(
          n, 0, [](auto g, auto) HWY_ATTR { return g; },
          [&](auto g, auto a) HWY_ATTR { return hn::Mul(g, hn::Sub(a, m)); }, dy + plane * n, v + plane * n);
      sums[plane].second *= static_cast<double>(inverse_deviation);
    }
  });
}

void plane_normalize(const Tensor& out, const Tensor& x, std::size_t at, std::size_t n, float mean,
                     float inverse_deviation, float weight, float bias) {
  const Floats d;
  const auto m = hn::Set(d, mean), r = hn::Set(d, inverse_deviation), w = hn::Set(d, weight),
             b = hn::Set(d, bias);
  map_planes(
      false, at, n, [&](auto v) HWY_ATTR { return hn::Add(hn::Mul(hn::Mul(hn::Sub(v, m), r), w), b); }, out,
      x);
}

void group_normalize(const Tensor& out, const Tensor& x, std::size_t at, std::size_t n, std::size_t planes,
                     float mean, float inverse_deviation, const float* weight, const float* bias) {
  for (std::size_t plane = 0; plane < planes; ++plane)
    plane_normalize(out, x, at + plane * n, n, mean, inverse_deviation, weight[plane], bias[plane]);
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
  map_planes(accumulate, at, n, gradient, d_x, d_out, x);
}

void group_normalize_backward(const Tensor& d_x, const Tensor& d_out, const Tensor& x, std::size_t at,
                              std::size_t n, std::size_t planes, const NormGradient& a, const float* weight,
                              bool accumulate) {
  NormGradient one = a;
  for (std::size_t plane = 0; plane < planes; ++plane) {
    one.weight = weight[plane];
    plane_normalize_backward(d_x, d_out, x, at + plane * n, n, one, accumulate);
  }
}

void plane_scale(const Tensor& d_x, const Tensor& d_out, std::size_t at, std::size_t n, float factor,
                 bool accumulate) {
  const Floats d;
  const auto f = hn::Set(d, factor);
  map_planes(
      accumulate, at, n, [&](auto dy) HWY_ATTR { return hn::Mul(dy, f); }, d_x, d_out);
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
HWY_EXPORT(plane_gradient_sums);
HWY_EXPORT(plane_centred_moments);
HWY_EXPORT(group_gradient_sums);
HWY_EXPORT(group_normalize);
HWY_EXPORT(group_normalize_backward);
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

Sums centred_sums(const Tensor& x, std::size_t at, std::size_t n, float centre) {
  return HWY_DYNAMIC_DISPATCH(plane_centred_moments)(x, at, n, centre);
}

void group_sums_of_gradients(Sums* sums, const Tensor& d_out, const Tensor& x, std::size_t at, std::size_t n,
                             std::size_t planes, float mean, float inverse_deviation) {
  HWY_DYNAMIC_DISPATCH(group_gradient_sums)(sums, d_out, x, at, n, planes, mean, inverse_deviation);
}

void normalize_group(const Tensor& out, const Tensor& x, std::size_t at, std::size_t n, std::size_t planes,
                     float mean, float inverse_deviation, const float* weight, const float* bias) {
  HWY_DYNAMIC_DISPATCH(group_normalize)(out, x, at, n, planes, mean, inverse_deviation, weight, bias);
}

void normalize_group_backward(const Tensor& d_x, const Tensor& d_out, const Tensor& x, std::size_t at,
                              std::size_t n, std::size_t planes, const NormGradient& a, const float* weight,
                              Into into) {
  HWY_DYNAMIC_DISPATCH(group_normalize_backward)
  (d_x, d_out, x, at, n, planes, a, weight, into == Into::accumulate);
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
