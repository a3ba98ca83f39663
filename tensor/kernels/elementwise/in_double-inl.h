// Functions of f32 vectors that are computed in double and rounded once: powers, sine and cosine.
// Compiled once per target, like tensor/kernels/vector-inl.h.
#if defined(RZ_ELEMENTWISE_IN_DOUBLE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef RZ_ELEMENTWISE_IN_DOUBLE_INL_H_
#undef RZ_ELEMENTWISE_IN_DOUBLE_INL_H_
#else
#define RZ_ELEMENTWISE_IN_DOUBLE_INL_H_
#endif

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>

#include "tensor/kernels/logarithm-inl.h"

HWY_BEFORE_NAMESPACE();
namespace rz {
namespace HWY_NAMESPACE {

using WholeDoubles = hn::RebindToSigned<Doubles>;
using WholeVector = hn::Vec<WholeDoubles>;

HWY_INLINE DoubleVector in_doubles(double c) { return hn::Set(Doubles(), c); }

/// Rounded to f32. Without vector instructions Highway makes an overflow the largest number, not infinity.
HWY_INLINE hn::Vec<HalfFloats> rounded_to_floats(DoubleVector v) {
#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128
  HWY_ALIGN double lanes[hn::MaxLanes(Doubles())];
  HWY_ALIGN float narrow[hn::MaxLanes(Doubles())];
  hn::Store(v, Doubles(), lanes);
  for (std::size_t i = 0; i < hn::Lanes(Doubles()); ++i) narrow[i] = static_cast<float>(lanes[i]);
  return hn::Load(HalfFloats(), narrow);
#else
  return hn::DemoteTo(HalfFloats(), v);
#endif
}

/// f of the halves of f32 vectors in double, rounded to f32.
template <class F, class... V>
HWY_INLINE FloatVector in_double(const F& f, V... x) {
  const auto low = rounded_to_floats(f(lower_half(x)...));
#if HWY_TARGET == HWY_SCALAR
  return low;
#else
  return hn::Combine(Floats(), rounded_to_floats(f(upper_half(x)...)), low);
#endif
}

/// The polynomial with these coefficients, the highest first.
HWY_INLINE DoubleVector polynomial(DoubleVector x, std::initializer_list<double> coefficients) {
  const double* c = coefficients.begin();
  DoubleVector p = in_doubles(*c);
  while (++c != coefficients.end()) p = hn::MulAdd(p, x, in_doubles(*c));
  return p;
}

// ---- powers

/// The nearest integer in the low bits: of x + 1.5 · 2^52, for |x| < 2^51.
constexpr double integer_bits = 0x1.8p52;

/// log2 x for x >= 0, relative to its value within 2^-38. With x = 2^k m, √½ <= m < √2, and s = (m - 1) / (m
/// + 1), it is k + 2 artanh s / ln 2.
HWY_INLINE DoubleVector logarithm_of_two(DoubleVector x) {
  const Doubles d;
  const hn::RebindToUnsigned<Doubles> whole;
  const auto bits = hn::BitCast(whole, x), bias = hn::Set(whole, std::uint64_t{1024});
  const auto biased = hn::ShiftRight<52>(hn::Sub(
      hn::Add(bits, hn::ShiftLeft<52>(bias)), hn::Set(whole, std::uint64_t{0x3fe6a09e667f3bcd})));  // less √½
  const DoubleVector m = hn::BitCast(d, hn::Sub(bits, hn::ShiftLeft<52>(hn::Sub(biased, bias))));
  // Before AVX3 there is no instruction that converts integers of 64 bits.
  const auto low_bits = hn::Or(biased, hn::BitCast(whole, in_doubles(integer_bits)));
  const DoubleVector k = hn::Sub(hn::BitCast(d, low_bits), in_doubles(integer_bits + 1024));
  const DoubleVector s = hn::Div(hn::Sub(m, in_doubles(1)), hn::Add(m, in_doubles(1)));
  const DoubleVector series =
      polynomial(hn::Mul(s, s), {1.0 / 13, 1.0 / 11, 1.0 / 9, 1.0 / 7, 1.0 / 5, 1.0 / 3, 1});
  const DoubleVector log = hn::MulAdd(hn::Mul(s, in_doubles(2.8853900817779268)), series, k);  // 2 / ln 2
  const double infinite = std::numeric_limits<double>::infinity();
  const DoubleVector special = hn::IfThenElse(hn::Eq(x, hn::Zero(d)), in_doubles(-infinite), x);
  return hn::IfThenElse(hn::And(hn::Gt(x, hn::Zero(d)), hn::Lt(x, in_doubles(infinite))), log, special);
}

/// 2^x within 2^-36 of its value; 0 below 2^-1000, 2^1000 above that. NaN stays NaN.
HWY_INLINE DoubleVector power_of_two(DoubleVector x) {
  const Doubles d;
  const WholeDoubles whole;
  const DoubleVector limit = in_doubles(1000);
  const auto below = hn::Lt(x, hn::Neg(limit));
  x = hn::IfThenElse(below, hn::Neg(limit), x);
  x = hn::IfThenElse(hn::Gt(x, limit), limit, x);
  const DoubleVector shifted = hn::Add(x, in_doubles(integer_bits));
  const DoubleVector rest = hn::Mul(hn::Sub(x, hn::Sub(shifted, in_doubles(integer_bits))),
                                    in_doubles(0.69314718055994531));  // ln 2
  const DoubleVector p = polynomial(
      rest, {1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1, 1});
  const auto exponent = hn::Add(hn::BitCast(whole, shifted), hn::Set(whole, std::int64_t{1023}));
  return hn::IfThenZeroElse(below, hn::Mul(p, hn::BitCast(d, hn::ShiftLeft<52>(exponent))));
}

/// x^y for every pair of numbers as in C and IEEE 754: x^0 = 1^y = 1 also for NaN, the power of a negative
/// number is NaN unless y is an integer.
HWY_INLINE FloatVector power(FloatVector x, FloatVector y) {
  const Floats d;
  const FloatVector zero = hn::Zero(d), one = hn::Set(d, 1.0f), absolute = hn::Abs(x),
                    infinite = hn::Set(d, std::numeric_limits<float>::infinity());
  const FloatVector magnitude = in_double(
      [](auto a, auto b) HWY_ATTR { return power_of_two(hn::Mul(b, logarithm_of_two(a))); }, absolute, y);
  const FloatVector half = hn::Mul(y, hn::Set(d, 0.5f));
  const auto whole = hn::Eq(hn::Round(y), y), odd = hn::AndNot(hn::Eq(hn::Round(half), half), whole);
  const auto negative = hn::Lt(hn::CopySignToAbs(one, x), zero);  // -0, too
  const FloatVector signed_magnitude = hn::IfThenElse(hn::And(negative, odd), hn::Neg(magnitude), magnitude);
  const auto undefined = hn::AndNot(whole, hn::And(hn::Lt(x, zero), hn::Lt(absolute, infinite)));
  const FloatVector result = hn::IfThenElse(undefined, hn::NaN(d), signed_magnitude);
  const auto is_one = hn::Or(hn::Or(hn::Eq(y, zero), hn::Eq(x, one)),
                             hn::And(hn::Eq(absolute, one), hn::Eq(hn::Abs(y), infinite)));
  return hn::IfThenElse(is_one, one, result);
}

// ---- sine and cosine

constexpr double two_by_pi = 0.63661977236758134;
/// Polynomials for sin x = x + x³ S(x²) and cos x = 1 + x² C(x²), |x| <= π/4, within 2^-34 (FreeBSD's
/// k_sinf.c and k_cosf.c).
constexpr double sine_terms[] = {0x1.6cd878c3b46a7p-19, -0x1.a00f9e2cae774p-13, 0x1.11110896efbb2p-7,
                                 -0x1.5555554cbac77p-3};
constexpr double cosine_terms[] = {0x1.99342e0ee5069p-16, -0x1.6c087e80f1e27p-10, 0x1.55553e1053a42p-5,
                                   -0x1.ffffffd0c5e81p-2};

/// sin(x + quarter · π/2) for |x| <= 2^20. The reduction of x by n · π/2 is exact to 2^-60: the first part of
/// π/2 has 33 bits, so that its multiples are exact.
HWY_INLINE DoubleVector sine_of_moderate(DoubleVector x, std::int64_t quarter) {
  const Doubles d;
  const WholeDoubles whole;
  const DoubleVector shifted = hn::MulAdd(x, in_doubles(two_by_pi), in_doubles(integer_bits));
  const DoubleVector n = hn::Sub(shifted, in_doubles(integer_bits));
  DoubleVector r = hn::NegMulAdd(n, in_doubles(1.57079632673412561417), x);
  r = hn::NegMulAdd(n, in_doubles(6.07710050650619224932e-11), r);
  const DoubleVector square = hn::Mul(r, r);
  DoubleVector s = hn::Zero(d), c = hn::Zero(d);
  for (int i = 0; i < 4; ++i) {
    s = hn::MulAdd(s, square, in_doubles(sine_terms[i]));
    c = hn::MulAdd(c, square, in_doubles(cosine_terms[i]));
  }
  s = hn::Mul(r, hn::MulAdd(s, square, in_doubles(1)));  // a product, which keeps -0
  c = hn::MulAdd(c, square, in_doubles(1));
  const auto quarters = hn::Add(hn::BitCast(whole, shifted), hn::Set(whole, quarter));
  const auto odd = hn::RebindMask(d, hn::TestBit(quarters, hn::Set(whole, std::int64_t{1})));
  const auto sign = hn::ShiftLeft<62>(hn::And(quarters, hn::Set(whole, std::int64_t{2})));
  return hn::Xor(hn::IfThenElse(odd, c, s), hn::BitCast(d, sign));
}

/// The same for a finite |x| >= 2^20 (Payne and Hanek, 1983, doi:10.1145/1057600.1057602). With x = m · 2^e,
/// m an integer of 24 bits, it multiplies m by those 96 bits of 2^e · 2/π that matter modulo 4: x is then
/// known to 2^-60 of a quarter turn.
inline float sine_of_large(float x, std::int64_t quarter) {
  /// 2/π after 32 zeros.
  constexpr std::uint32_t bits_of_two_by_pi[] = {0,          0xa2f9836e, 0x4e441529, 0xfc2757d1,
                                                 0xf534ddc0, 0xdb629599, 0x3c439041, 0xfe5163ab};
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const std::uint64_t m = (bits & 0x7fffffu) | 0x800000u;
  const unsigned from = (bits >> 23 & 0xffu) - 120;  // 30 + e: the first bit, of weight 2 in 2^e · 2/π
  const auto word = [&](unsigned i) {
    const std::uint32_t* const at = bits_of_two_by_pi + from / 32 + i;
    return (std::uint64_t{at[0]} << 32 | at[1]) << from % 32 >> 32;
  };
  const std::uint64_t product = (m * word(0) << 32) + m * word(1) + (m * word(2) >> 32);  // of 2^-62
  const std::uint64_t n = (product + (std::uint64_t{1} << 61)) >> 62;
  const double r =
      static_cast<double>(static_cast<std::int64_t>(product - (n << 62))) * (0x1p-62 / two_by_pi);
  const std::uint64_t quarters = (x < 0 ? 0 - n : n) + static_cast<std::uint64_t>(quarter);
  const double signed_r = x < 0 ? -r : r, square = r * r;
  double s = 0, c = 0;
  for (int i = 0; i < 4; ++i) s = s * square + sine_terms[i], c = c * square + cosine_terms[i];
  const double value = quarters & 1 ? 1 + square * c : signed_r * (1 + square * s);
  return static_cast<float>(quarters & 2 ? -value : value);
}

/// sin(x + quarter · π/2) within 1 ulp; NaN for infinities.
HWY_INLINE FloatVector sine(FloatVector x, std::int64_t quarter) {
  constexpr float moderate = 0x1p20f, infinite = std::numeric_limits<float>::infinity();
  const Floats d;
  const FloatVector y = in_double([&](auto v) HWY_ATTR { return sine_of_moderate(v, quarter); }, x);
  const FloatVector absolute = hn::Abs(x);
  const auto large = hn::And(hn::Gt(absolute, hn::Set(d, moderate)), hn::Lt(absolute, hn::Set(d, infinite)));
  if (HWY_LIKELY(hn::AllFalse(d, large))) return y;
  HWY_ALIGN float in[hn::MaxLanes(d)], out[hn::MaxLanes(d)];
  hn::Store(x, d, in), hn::Store(y, d, out);
  for (std::size_t i = 0; i < hn::Lanes(d); ++i)
    if (std::abs(in[i]) > moderate && std::abs(in[i]) < infinite) out[i] = sine_of_large(in[i], quarter);
  return hn::Load(d, out);
}

HWY_NOINLINE inline FloatVector sine_out_of_line(FloatVector x, std::int64_t quarter) {
  return sine(x, quarter);
}

/// The same of numbers that f16 or bf16 has, within 1.1 ulp, in f32. Up to 2^13 the products of n
/// and the first two parts of π/2, which have 11 bits each, are exact, and so is their difference from a
/// number of 11 bits that is nearly a multiple of π/2.
HWY_INLINE FloatVector sine_of_16_bits(FloatVector x, std::int64_t quarter) {
  const Floats d;
  const hn::RebindToSigned<Floats> whole;
  const auto set = [&](double c) HWY_ATTR { return hn::Set(d, static_cast<float>(c)); };
  if (HWY_UNLIKELY(!hn::AllTrue(d, hn::Le(hn::Abs(x), set(0x1p13))))) return sine_out_of_line(x, quarter);
  constexpr double half_turn = 1.57079632679489662, first = 0x1.92p0, second = 0x1.fb4p-12;
  const FloatVector shifted = hn::MulAdd(x, set(two_by_pi), set(0x1.8p23)),
                    n = hn::Sub(shifted, set(0x1.8p23));
  FloatVector r = hn::NegMulAdd(n, set(first), x);
  r = hn::NegMulAdd(n, set(second), r);
  r = hn::NegMulAdd(n, set(half_turn - first - second), r);
  const FloatVector square = hn::Mul(r, r);
  FloatVector s = hn::Zero(d), c = hn::Zero(d);
  for (int i = 0; i < 4; ++i) {
    s = hn::MulAdd(s, square, set(sine_terms[i]));
    c = hn::MulAdd(c, square, set(cosine_terms[i]));
  }
  s = hn::Mul(r, hn::MulAdd(s, square, set(1)));
  c = hn::MulAdd(c, square, set(1));
  const auto quarters =
      hn::Add(hn::BitCast(whole, shifted), hn::Set(whole, static_cast<std::int32_t>(quarter)));
  const auto odd = hn::RebindMask(d, hn::TestBit(quarters, hn::Set(whole, 1)));
  const auto sign = hn::ShiftLeft<30>(hn::And(quarters, hn::Set(whole, 2)));
  return hn::Xor(hn::IfThenElse(odd, c, s), hn::BitCast(d, sign));
}

}  // namespace HWY_NAMESPACE
}  // namespace rz
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
