// Vector helpers of the kernels. Compiled once per target: include it after <hwy/highway.h>, outside any
// namespace. Elements are stored as f32, f16 or bf16 and computed in f32: a load is exact, a store rounds
// once, to nearest, ties to even. A tail shorter than a vector is copied to a padded buffer, so that no
// memory outside the data is read.
#if defined(RZ_TENSOR_VECTOR_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef RZ_TENSOR_VECTOR_INL_H_
#undef RZ_TENSOR_VECTOR_INL_H_
#else
#define RZ_TENSOR_VECTOR_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <limits>
#include <type_traits>

#include "comm/core/math.h"
#include "tensor/kernels/dtype_dispatch.h"
#include "tensor/tensor.h"

HWY_BEFORE_NAMESPACE();
namespace rz {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using Floats = hn::ScalableTag<float>;
using Doubles = hn::ScalableTag<double>;
using HalfFloats = hn::Rebind<float, Doubles>;  // as many floats as a vector of doubles has lanes
using FloatVector = hn::Vec<Floats>;
using DoubleVector = hn::Vec<Doubles>;

// ---- loads and stores

template <class D>
HWY_INLINE hn::Vec<D> load(D d, const float* p) {
  return hn::LoadU(d, p);
}
template <class D>
HWY_INLINE void store(hn::Vec<D> v, D d, float* p) {
  hn::StoreU(v, d, p);
}

template <class D>
HWY_INLINE hn::Vec<D> load(D d, const bf16* p) {
  const hn::Rebind<std::uint16_t, D> narrow;
  const hn::RebindToUnsigned<D> wide;
  const auto bits = hn::LoadU(narrow, reinterpret_cast<const std::uint16_t*>(p));
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(wide, bits)));
}
/// Rounded to bf16, in the lower half of each lane: the arithmetic of detail::narrow_to_bf16. Highway's own
/// conversion truncates, and its Ne() is false for NaN.
template <class D>
HWY_INLINE hn::Vec<hn::RebindToUnsigned<D>> bits_of_bf16(D, hn::Vec<D> v) {
  const hn::RebindToUnsigned<D> wide;
  const auto bits = hn::BitCast(wide, v), high = hn::ShiftRight<16>(bits);
  const auto odd = hn::And(high, hn::Set(wide, 1u));
  const auto nearest = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(wide, 0x7fffu))));
  const auto nan = hn::RebindMask(wide, hn::IsNaN(v));
  return hn::IfThenElse(nan, hn::Or(high, hn::Set(wide, 0x40u)), nearest);
}
template <class D>
HWY_INLINE void store(hn::Vec<D> v, D d, bf16* p) {
  const hn::Rebind<std::uint16_t, D> narrow;
  const hn::RebindToSigned<hn::RebindToUnsigned<D>> whole;  // below 2^16: the conversion does not saturate
  hn::StoreU(hn::DemoteTo(narrow, hn::BitCast(whole, bits_of_bf16(d, v))), narrow,
             reinterpret_cast<std::uint16_t*>(p));
}

// Before AVX2 Highway converts f16 in software, which loses infinity and NaN.
template <class D>
HWY_INLINE hn::Vec<D> load(D d, const f16* p) {
#if HWY_TARGET <= HWY_AVX2
  const hn::Rebind<hwy::float16_t, D> narrow;
  return hn::PromoteTo(d, hn::LoadU(narrow, reinterpret_cast<const hwy::float16_t*>(p)));
#else
  HWY_ALIGN float lanes[hn::MaxLanes(d)];
  for (std::size_t i = 0; i < hn::Lanes(d); ++i) lanes[i] = to_f32(p[i]);
  return hn::Load(d, lanes);
#endif
}
template <class D>
HWY_INLINE void store(hn::Vec<D> v, [[maybe_unused]] D d, f16* p) {
#if HWY_TARGET <= HWY_AVX2
  const hn::Rebind<hwy::float16_t, D> narrow;
  hn::StoreU(hn::DemoteTo(narrow, v), narrow, reinterpret_cast<hwy::float16_t*>(p));
#else
  HWY_ALIGN float lanes[hn::MaxLanes(d)];
  hn::Store(v, d, lanes);
  for (std::size_t i = 0; i < hn::Lanes(d); ++i) p[i] = from_f32<f16>(lanes[i]);
#endif
}

/// v as memory of T holds it.
template <class T, class D>
HWY_INLINE hn::Vec<D> rounded(D d, hn::Vec<D> v) {
  if constexpr (std::is_same_v<T, bf16>) return hn::BitCast(d, hn::ShiftLeft<16>(bits_of_bf16(d, v)));
  if constexpr (std::is_same_v<T, f16>) {
    HWY_ALIGN f16 lanes[hn::MaxLanes(d)];
    store(v, d, lanes);
    return load(d, lanes);
  }
  return v;
}

/// Loads n < lanes elements from p; the other lanes are `pad`.
template <class D, class T>
HWY_INLINE hn::Vec<D> load_part(D d, const T* p, std::size_t n, float pad) {
  HWY_ALIGN float lanes[hn::MaxLanes(d)];
  for (std::size_t i = 0; i < hn::Lanes(d); ++i) lanes[i] = i < n ? to_f32(p[i]) : pad;
  return hn::Load(d, lanes);
}

template <class D, class T>
HWY_INLINE void store_part(hn::Vec<D> v, D d, T* p, std::size_t n) {
  HWY_ALIGN T lanes[hn::MaxLanes(d)];
  store(v, d, lanes);
  std::memcpy(p, lanes, n * sizeof(T));
}

// ---- loops

/// out[i] = f(in[i]…), vectorized. The output may be an input.
template <class Out, class F, class... In>
HWY_INLINE void map(Out* out, std::size_t n, const F& f, const In*... in) {
  const Floats d;
  const std::size_t lanes = hn::Lanes(d);
  std::size_t i = 0;
  for (; i + lanes <= n; i += lanes) store(f(load(d, in + i)...), d, out + i);
  if (i < n) store_part(f(load_part(d, in + i, n - i, 0.0f)...), d, out + i, n - i);
}

/// out[i] += f(in[i]…) if `accumulate`, otherwise out[i] = f(in[i]…).
template <class Out, class F, class... In>
HWY_INLINE void map_into(bool accumulate, Out* out, std::size_t n, const F& f, const In*... in) {
  if (accumulate)
    map(
        out, n, [&](auto before, auto... x) HWY_ATTR { return hn::Add(before, f(x...)); },
        static_cast<const Out*>(out), in...);
  else
    map(out, n, f, in...);
}

/// The elements of a tensor whose dtype has been checked. Tensor::data() checks it again, which takes as long
/// as a short row.
template <class T>
HWY_INLINE T* elements(const Tensor& t) {
  return reinterpret_cast<T*>(t.raw());
}

/// map() on elements [begin, end) of tensors of one dtype.
template <class F, class... In>
HWY_INLINE void map_range(std::size_t begin, std::size_t end, const F& f, const Tensor& out,
                          const In&... in) {
  ops::dispatch_dtype(out.dtype(), [&](auto t) HWY_ATTR {
    using T = decltype(t);
    map(elements<T>(out) + begin, end - begin, f, (elements<const T>(in) + begin)...);
  });
}

/// map_into() on elements [begin, end) of tensors of one dtype.
template <class F, class... In>
HWY_INLINE void map_range_into(bool accumulate, std::size_t begin, std::size_t end, const F& f,
                               const Tensor& out, const In&... in) {
  ops::dispatch_dtype(out.dtype(), [&](auto t) HWY_ATTR {
    using T = decltype(t);
    map_into(accumulate, elements<T>(out) + begin, end - begin, f, (elements<const T>(in) + begin)...);
  });
}

/// Σ f(in[i]…) in double. f maps vectors of doubles to a vector of doubles; f(0…) must be 0.
template <class F, class... In>
HWY_INLINE double sum(std::size_t n, const F& f, const In*... in) {
  const Doubles d;
  const HalfFloats h;
  const std::size_t lanes = hn::Lanes(d);
  DoubleVector even = hn::Zero(d), odd = hn::Zero(d);
  std::size_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    even = hn::Add(even, f(hn::PromoteTo(d, load(h, in + i))...));
    odd = hn::Add(odd, f(hn::PromoteTo(d, load(h, in + i + lanes))...));
  }
  for (; i < n; i += lanes) {
    const std::size_t left = n - i;
    even = hn::Add(even, left < lanes ? f(hn::PromoteTo(d, load_part(h, in + i, left, 0.0f))...)
                                      : f(hn::PromoteTo(d, load(h, in + i))...));
  }
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(even, odd)));
}

/// sums[i] += f(in[i]…), which is computed in f32, on vectors of HalfFloats.
template <class F, class... In>
HWY_INLINE void add_to_sums(double* HWY_RESTRICT sums, std::size_t n, const F& f, const In*... in) {
  const Doubles d;
  const HalfFloats h;
  const std::size_t lanes = hn::Lanes(d);
  std::size_t i = 0;
  for (; i + lanes <= n; i += lanes)
    hn::StoreU(hn::Add(hn::LoadU(d, sums + i), hn::PromoteTo(d, f(load(h, in + i)...))), d, sums + i);
  if (i == n) return;
  HWY_ALIGN double rest[hn::MaxLanes(d)];
  hn::Store(hn::PromoteTo(d, f(load_part(h, in + i, n - i, 0.0f)...)), d, rest);
  for (std::size_t j = 0; j < lanes; ++j)
    if (i + j < n) sums[i + j] += rest[j];
}

template <class T>
HWY_INLINE float largest(const T* in, std::size_t n) {
  const Floats d;
  const std::size_t lanes = hn::Lanes(d);
  const float lowest = -std::numeric_limits<float>::infinity();
  FloatVector a = hn::Set(d, lowest), b = a;
  std::size_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    a = hn::Max(load(d, in + i), a);
    b = hn::Max(load(d, in + i + lanes), b);
  }
  for (; i < n; i += lanes)
    a = hn::Max(n - i < lanes ? load_part(d, in + i, n - i, lowest) : load(d, in + i), a);
  return hn::GetLane(hn::MaxOfLanes(d, hn::Max(a, b)));
}

/// Reduces x = n·ln 2 + r with |r| ≤ ln 2 / 2, |n| < 2^22. expm1 is the series of e^r - 1 up to r^7; the
/// relative error is below 2^-27. The last bits of `shifted` are n.
struct Reduced {
  FloatVector shifted, expm1;

  hn::Vec<hn::RebindToSigned<Floats>> n() const {
    const hn::RebindToSigned<Floats> i;
    return hn::Sub(hn::BitCast(i, shifted), hn::BitCast(i, hn::Set(Floats(), 0x1.8p23f)));
  }
};
HWY_INLINE Reduced reduce_exponent(FloatVector x) {
  const Floats d;
  // The sum with 1.5 · 2^23 is rounded to an integer; NearestInt() takes more instructions.
  const FloatVector shift = hn::Set(d, 0x1.8p23f);
  const FloatVector shifted = hn::Add(hn::Mul(x, hn::Set(d, 1.44269504f)), shift);
  const FloatVector whole = hn::Sub(shifted, shift);
  // ln 2 in two parts; the first has few bits, so that its multiples are exact
  FloatVector r = hn::NegMulAdd(whole, hn::Set(d, 0.693145751953125f), x);
  r = hn::NegMulAdd(whole, hn::Set(d, 1.42860682030941723e-6f), r);
  FloatVector p = hn::Set(d, 1.0f / 5040);
  for (const float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f})
    p = hn::MulAdd(p, r, hn::Set(d, c));
  return {shifted, hn::MulAdd(hn::Mul(p, r), r, r)};
}

/// x · 2^n with two factors, so that results may be subnormal or overflow to infinity.
HWY_INLINE FloatVector scale_by_power(FloatVector x, hn::Vec<hn::RebindToSigned<Floats>> n) {
  const Floats d;
  const auto bias = hn::Set(hn::RebindToSigned<Floats>(), 127);
  const auto half = hn::ShiftRight<1>(n);
  const auto power = [&](auto e) HWY_ATTR { return hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(e, bias))); };
  return hn::Mul(hn::Mul(x, power(half)), power(hn::Sub(n, half)));
}

/// e^x within about 1 ulp. NaN stays NaN, so that divergence is visible.
HWY_INLINE FloatVector exponential(FloatVector x) {
  const Floats d;
  const FloatVector low = hn::Set(d, -104.0f), high = hn::Set(d, 104.0f);
  x = hn::IfThenElse(hn::Lt(x, low), low, x);
  x = hn::IfThenElse(hn::Gt(x, high), high, x);
  const Reduced r = reduce_exponent(x);
  return scale_by_power(hn::Add(r.expm1, hn::Set(d, 1.0f)), r.n());
}

/// e^x for x < 40, such as a difference from a maximum: the bits of exponential(x), by fewer instructions.
/// 2^n is multiplied by 2^64, and the product by 2^-64, which rounds once.
HWY_INLINE FloatVector exponential_of_difference(FloatVector x) {
  const Floats d;
  const hn::RebindToSigned<Floats> i;
  const FloatVector low = hn::Set(d, -104.0f);
  const Reduced r = reduce_exponent(hn::IfThenElse(hn::Lt(x, low), low, x));
  const auto power = hn::Add(hn::ShiftLeft<23>(hn::BitCast(i, r.shifted)), hn::Set(i, (127 + 64) << 23));
  const FloatVector e = hn::Mul(hn::Add(r.expm1, hn::Set(d, 1.0f)), hn::BitCast(d, power));
  return hn::Mul(e, hn::Set(d, 0x1p-64f));
}

/// Σ e^f(in[i]) in double, in blocks of f32 vectors; 0 where f gives -infinity, as it must for -infinity.
template <class F, class T>
HWY_INLINE double sum_of_exponentials(const T* in, std::size_t n, const F& f) {
  constexpr std::size_t block = 1024;
  const Floats d;
  const std::size_t lanes = hn::Lanes(d);
  double total = 0;
  for (std::size_t first = 0; first < n; first += block) {
    const std::size_t end = std::min(n, first + block);
    FloatVector a = hn::Zero(d), b = a;
    std::size_t i = first;
    for (; i + 2 * lanes <= end; i += 2 * lanes) {
      a = hn::Add(a, exponential(f(load(d, in + i))));
      b = hn::Add(b, exponential(f(load(d, in + i + lanes))));
    }
    for (; i < end; i += lanes) {
      const float lowest = -std::numeric_limits<float>::infinity();
      const auto x = end - i < lanes ? load_part(d, in + i, end - i, lowest) : load(d, in + i);
      a = hn::Add(a, exponential(f(x)));
    }
    total += hn::GetLane(hn::SumOfLanes(d, hn::Add(a, b)));
  }
  return total;
}

/// tanh x from e^2|x| - 1, without cancellation near 0.
HWY_INLINE FloatVector hyperbolic_tangent(FloatVector x) {
  const Floats d;
  const FloatVector one = hn::Set(d, 1.0f), high = hn::Set(d, 20.0f);
  FloatVector y = hn::Add(hn::Abs(x), hn::Abs(x));
  y = hn::IfThenElse(hn::Gt(y, high), high, y);
  const Reduced r = reduce_exponent(y);
  const FloatVector power = scale_by_power(one, r.n());
  const FloatVector e = hn::MulAdd(power, r.expm1, hn::Sub(power, one));
  return hn::CopySign(hn::Div(e, hn::Add(e, hn::Set(d, 2.0f))), x);
}

}  // namespace HWY_NAMESPACE
}  // namespace rz
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
