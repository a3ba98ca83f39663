// Logarithms of f32 vectors, and the halves of such vectors in double. Compiled once per target, like
// tensor/kernels/vector-inl.h.
#if defined(RZ_TENSOR_LOGARITHM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef RZ_TENSOR_LOGARITHM_INL_H_
#undef RZ_TENSOR_LOGARITHM_INL_H_
#else
#define RZ_TENSOR_LOGARITHM_INL_H_
#endif

#include <limits>

#include "tensor/kernels/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace rz {
namespace HWY_NAMESPACE {

/// The halves of a vector in double. Of one lane the upper half is 0.
HWY_INLINE DoubleVector lower_half(FloatVector v) {
  return hn::PromoteTo(Doubles(), hn::LowerHalf(HalfFloats(), v));
}
#if HWY_TARGET == HWY_SCALAR
HWY_INLINE DoubleVector upper_half(FloatVector) { return hn::Zero(Doubles()); }
#else
HWY_INLINE DoubleVector upper_half(FloatVector v) {
  return hn::PromoteTo(Doubles(), hn::UpperHalf(HalfFloats(), v));
}
#endif

/// 2 artanh s, |s| ≤ 1/3, by the series up to s^15: the rest is below 2^-29 of it.
HWY_INLINE FloatVector twice_artanh(FloatVector s) {
  const Floats d;
  const FloatVector square = hn::Mul(s, s), twice = hn::Add(s, s);
  FloatVector p = hn::Set(d, 1.0f / 15);
  for (const float c : {1.0f / 13, 1.0f / 11, 1.0f / 9, 1.0f / 7, 1.0f / 5, 1.0f / 3})
    p = hn::MulAdd(p, square, hn::Set(d, c));
  return hn::MulAdd(hn::Mul(twice, square), p, twice);
}

/// log(1 + x) for 0 ≤ x ≤ 1 within a few ulp, also near 0.
HWY_INLINE FloatVector log_of_one_plus(FloatVector x) {
  return twice_artanh(hn::Div(x, hn::Add(x, hn::Set(Floats(), 2.0f))));
}

/// log x = exponent · ln 2 + rest with |rest| ≤ ln 2 / 2, which is accurate to a few ulp of its own.
struct Logarithm {
  FloatVector exponent, rest;
};
/// For x = 0 the rest is NaN, as for negative x; infinity and NaN stay what they are.
HWY_INLINE Logarithm logarithm(FloatVector x) {
  const Floats d;
  const hn::RebindToSigned<Floats> whole;
  const FloatVector one = hn::Set(d, 1.0f), zero = hn::Zero(d);
  const auto subnormal = hn::Lt(x, hn::Set(d, std::numeric_limits<float>::min()));
  const auto bits = hn::BitCast(whole, hn::IfThenElse(subnormal, hn::Mul(x, hn::Set(d, 0x1p25f)), x));
  const auto exponent = hn::ShiftRight<23>(hn::Sub(bits, hn::Set(whole, 0x3f3504f3)));  // of x / √½
  const FloatVector m = hn::BitCast(d, hn::Sub(bits, hn::ShiftLeft<23>(exponent)));
  const FloatVector rest = twice_artanh(hn::Div(hn::Sub(m, one), hn::Add(m, one)));
  const auto infinite = hn::Gt(x, hn::Set(d, std::numeric_limits<float>::max()));
  const FloatVector special =
      hn::IfThenElse(infinite, x, hn::Set(d, std::numeric_limits<float>::quiet_NaN()));
  const auto ordinary = hn::AndNot(infinite, hn::Gt(x, zero));
  return {hn::Sub(hn::ConvertTo(d, exponent), hn::IfThenElseZero(subnormal, hn::Set(d, 25.0f))),
          hn::IfThenElse(ordinary, rest, special)};
}

}  // namespace HWY_NAMESPACE
}  // namespace rz
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
