// The operators of tensor/element_ops.inc on vectors of f32. Compiled once per target: include it after
// tensor/kernels/vector-inl.h, outside any namespace.
#if defined(RZ_ELEMENTWISE_FUNCTIONS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef RZ_ELEMENTWISE_FUNCTIONS_INL_H_
#undef RZ_ELEMENTWISE_FUNCTIONS_INL_H_
#else
#define RZ_ELEMENTWISE_FUNCTIONS_INL_H_
#endif

#include "tensor/kernels/elementwise/in_double-inl.h"
#include "tensor/kernels/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace rz {
namespace HWY_NAMESPACE {
namespace functions {

using V = FloatVector;

HWY_INLINE V constant(float c) { return hn::Set(Floats(), c); }
HWY_INLINE V zero() { return hn::Zero(Floats()); }

/// log x within about 1 ulp. With x = 2^k (1 + f), √½ <= 1 + f < √2, and s = f / (2 + f), log(1 + f) is 2
/// atanh s = f - f²/2 + s (f²/2 + R), where R is the rest of the series of atanh.
HWY_INLINE V logarithm(V x) {
  const Floats d;
  const hn::RebindToSigned<Floats> i;
  const V smallest = constant(1.17549435e-38f);
  const auto subnormal = hn::Lt(x, smallest);
  const V y = hn::IfThenElse(subnormal, hn::Mul(x, constant(8388608)), x);
  const auto bits = hn::Sub(hn::BitCast(i, y), hn::Set(i, 0x3f3504f3));  // the bits of √½
  const auto k = hn::ShiftRight<23>(bits);
  const V f = hn::Sub(hn::BitCast(d, hn::Add(hn::And(bits, hn::Set(i, 0x7fffff)), hn::Set(i, 0x3f3504f3))),
                      constant(1));
  const V power = hn::Sub(hn::ConvertTo(d, k), hn::IfThenElseZero(subnormal, constant(23)));
  const V s = hn::Div(f, hn::Add(f, constant(2))), z = hn::Mul(s, s),
          half = hn::Mul(hn::Mul(f, f), constant(0.5f));
  V r = constant(2.0f / 9);
  for (const float c : {2.0f / 7, 2.0f / 5, 2.0f / 3}) r = hn::MulAdd(r, z, constant(c));
  // ln 2 in two parts; the first has few bits, so that its multiples are exact
  const V low = hn::MulAdd(s, hn::MulAdd(r, z, half), hn::Mul(power, constant(1.42860682030941723e-6f)));
  const V sum = hn::MulAdd(power, constant(0.693145751953125f), hn::Sub(f, hn::Sub(half, low)));
  const V infinite = constant(std::numeric_limits<float>::infinity());
  const V edge =
      hn::IfThenElse(hn::Eq(x, zero()), hn::Neg(infinite), hn::Sub(infinite, infinite));  // below 0: NaN
  const V outside = hn::IfThenElse(hn::Le(x, zero()), edge, x);                           // NaN and infinity
  return hn::IfThenElse(hn::And(hn::Gt(x, zero()), hn::Lt(x, infinite)), sum, outside);
}

/// 1 / (1 + e^-x) and 1 / (1 + e^x), their difference from 1, without overflow or cancellation.
struct Logistic {
  V value, rest;
};
HWY_INLINE Logistic logistic(V x) {
  const V e = exponential(hn::Neg(hn::Abs(x))), larger = hn::Div(constant(1), hn::Add(constant(1), e));
  const V smaller = hn::Mul(e, larger);
  const auto negative = hn::Lt(x, zero());
  return {hn::IfThenElse(negative, smaller, larger), hn::IfThenElse(negative, larger, smaller)};
}

/// e^x - 1 for x <= 0, without cancellation near 0.
HWY_INLINE V exponential_minus_one(V x) {
  const V low = constant(-104);
  const Reduced r = reduce_exponent(hn::IfThenElse(hn::Lt(x, low), low, x));
  const V power = scale_by_power(constant(1), r.n());
  return hn::MulAdd(power, r.expm1, hn::Sub(power, constant(1)));
}

/// The polynomial with these coefficients, the highest first.
HWY_INLINE V horner(V x, std::initializer_list<float> coefficients) {
  const float* c = coefficients.begin();
  V p = constant(*c);
  while (++c != coefficients.end()) p = hn::MulAdd(p, x, constant(*c));
  return p;
}

/// a² - square, exactly, where `square` is a² rounded: without fused products by Dekker's.
HWY_INLINE V rest_of_square(V a, V square) {
#if HWY_NATIVE_FMA
  return hn::MulSub(a, a, square);
#else
  const hn::RebindToUnsigned<Floats> bits;
  const V high = hn::BitCast(Floats(), hn::And(hn::BitCast(bits, a), hn::Set(bits, 0xfffff000u))),
          low = hn::Sub(a, high);
  const V part = hn::MulAdd(hn::Add(high, high), low, hn::MulSub(high, high, square));
  return hn::MulAdd(low, low, part);
#endif
}

/// The normal distribution function within 5 ulp, as far as it is no subnormal number, and its density.
struct Normal {
  V distribution, density;
};
/// With a = |x|, ½ erfc(a / √2) = e^(-a²/2) / (a + 2.75) · q, where q is a polynomial in (a - 2.75) / (a
/// + 2.75) within 2^-25.7 (after Shepherd and Laframboise, 1981, doi:10.1090/S0025-5718-1981-0595058-X).
/// e^(-a²/2) is 2^n (1 + e) with a polynomial e in r = a² + n · 2 ln 2 within 2^-28. The rounding of a² would
/// be magnified a²/2 times: r has its rest. Beyond 16 all is 0 or 1. 2^n may be too small for a number: it is
/// 2^64 times as large, and q has 2^-64.
HWY_INLINE Normal normal(V x) {
  const Floats d;
  const hn::RebindToSigned<Floats> i;
  const V a = hn::Min(hn::Abs(x), constant(16)), square = hn::Mul(a, a);
  // n is the nearest integer to -a²/2 · log2(e): the last bits of its sum with 1.5 · 2^23
  const V shifted = hn::MulAdd(square, constant(-0.72134752f), constant(0x1.8p23f));
  const V n = hn::Sub(shifted, constant(0x1.8p23f));
  const auto bits = hn::Add(hn::ShiftLeft<23>(hn::BitCast(i, shifted)), hn::Set(i, (127 + 64) << 23));
  const V power = hn::BitCast(d, bits);
  // 2 ln 2 in two parts, as reduce_exponent()
  V r = hn::MulAdd(n, constant(2 * 0.693145751953125f), square);
  r = hn::Add(hn::MulAdd(n, constant(2 * 1.42860682030941723e-6f), r), rest_of_square(a, square));
  const V e = hn::Mul(
      r, horner(r, {2.15852178e-5f, -2.61523295e-4f, 2.60427431e-3f, -2.08331514e-2f, 0.124999985f, -0.5f}));
  const V inverse = hn::Div(constant(1), hn::Add(a, constant(2.75f)));
  const V t = hn::NegMulAdd(inverse, constant(5.5f), constant(1)), t2 = hn::Mul(t, t);
  constexpr float unit = 0x1p-64f;
  const V odd = horner(t2, {-7.04379563e-5f * unit, -2.46876851e-4f * unit, 3.18770995e-3f * unit,
                            -0.0165625513f * unit, -0.474354267f * unit});
  const V even = horner(t2, {-4.08969965e-4f * unit, 2.48319376e-3f * unit, -0.0164406337f * unit,
                             0.182333931f * unit, 0.718986034f * unit});
  const V scaled = hn::Mul(hn::MulAdd(odd, t, even), inverse);
  const V left = hn::Mul(hn::MulAdd(e, scaled, scaled), power);
  const V density = hn::Mul(hn::Mul(hn::Add(e, constant(1)), power), constant(0.39894228f * unit));
  return {hn::IfThenElse(hn::Lt(x, zero()), left, hn::Sub(constant(1), left)), density};
}

/// 0 where `other` holds, because the other operand is the result; half of dy where x = y; otherwise, also if
/// one is NaN, dy.
template <class M>
HWY_INLINE V unless(M other, V dy, V x, V y) {
  const V share = hn::IfThenElse(hn::Eq(x, y), hn::Mul(dy, constant(0.5f)), dy);
  return hn::IfThenZeroElse(other, share);
}
HWY_INLINE V not_a_number_or(V x, V y) { return hn::IfThenElse(hn::IsNaN(x), x, y); }

// ---- one operand: the value, and the gradient by dy and what the list names, each with the operator's
// parameter if it has one. For tensors of 16 bits a function may have others: value_of_16_bits() and
// gradient_of_16_bits() with less precision, or bits(), the value of i16 vectors of the numbers' bits.

struct exp {
  static HWY_INLINE V value(V x) { return exponential(x); }
  static HWY_INLINE V gradient(V dy, V y) { return hn::Mul(dy, y); }
};
struct log {
  static HWY_INLINE V value(V x) { return logarithm(x); }
  static HWY_INLINE V gradient(V dy, V x) { return hn::Div(dy, x); }
};
struct sqrt {
  static HWY_INLINE V value(V x) { return hn::Sqrt(x); }
  static HWY_INLINE V gradient(V dy, V y) { return hn::Div(hn::Mul(dy, constant(0.5f)), y); }
};
struct rsqrt {
  static HWY_INLINE V value(V x) { return hn::Div(constant(1), hn::Sqrt(x)); }
  static HWY_INLINE V gradient(V dy, V y) {
    return hn::Mul(hn::Mul(hn::Mul(dy, constant(-0.5f)), y), hn::Mul(y, y));
  }
};
struct reciprocal {
  static HWY_INLINE V value(V x) { return hn::Div(constant(1), x); }
  static HWY_INLINE V gradient(V dy, V y) { return hn::Mul(hn::Neg(dy), hn::Mul(y, y)); }
};
struct abs {
  static HWY_INLINE V value(V x) { return hn::Abs(x); }
  template <class D>
  static HWY_INLINE hn::Vec<D> bits(D d, hn::Vec<D> x, int /*infinity*/) {
    return hn::And(x, hn::Set(d, std::int16_t{0x7fff}));
  }
  static HWY_INLINE V gradient(V dy, V x) {
    return hn::IfThenElseZero(hn::Ne(x, zero()), hn::IfThenElse(hn::Lt(x, zero()), hn::Neg(dy), dy));
  }
};
struct relu {
  static HWY_INLINE V value(V x) { return hn::IfThenZeroElse(hn::Lt(x, zero()), x); }  // NaN stays NaN
  /// Below 0 are the bits from that of -0, the smallest, to that of -infinity.
  template <class D>
  static HWY_INLINE hn::Vec<D> bits(D d, hn::Vec<D> x, int infinity) {
    const auto lowest = hn::Set(d, std::int16_t{-0x8000}),
               past = hn::Set(d, static_cast<std::int16_t>(infinity - 0x8000 + 1));
    return hn::IfThenZeroElse(hn::And(hn::Gt(x, lowest), hn::Lt(x, past)), x);
  }
  static HWY_INLINE V gradient(V dy, V x) { return hn::IfThenZeroElse(hn::Le(x, zero()), dy); }
};
struct sigmoid {
  static HWY_INLINE V value(V x) { return logistic(x).value; }
  static HWY_INLINE V gradient(V dy, V y) { return hn::Mul(dy, hn::Mul(y, hn::Sub(constant(1), y))); }
};
struct silu {
  static HWY_INLINE V value(V x) { return hn::Mul(x, logistic(x).value); }
  static HWY_INLINE V gradient(V dy, V x) {
    const Logistic s = logistic(x);
    return hn::Mul(dy, hn::MulAdd(hn::Mul(x, s.value), s.rest, s.value));
  }
};
struct tanh {
  static HWY_INLINE V value(V x) { return hyperbolic_tangent(x); }
  static HWY_INLINE V gradient(V dy, V y) {
    return hn::Mul(dy, hn::Mul(hn::Sub(constant(1), y), hn::Add(constant(1), y)));
  }
};

struct sin {
  static HWY_INLINE V value(V x) { return sine(x, 0); }
  static HWY_INLINE V gradient(V dy, V x) { return hn::Mul(dy, sine(x, 1)); }
  static HWY_INLINE V value_of_16_bits(V x) { return sine_of_16_bits(x, 0); }
  static HWY_INLINE V gradient_of_16_bits(V dy, V x) { return hn::Mul(dy, sine_of_16_bits(x, 1)); }
};
struct cos {
  static HWY_INLINE V value(V x) { return sine(x, 1); }
  static HWY_INLINE V gradient(V dy, V x) { return hn::Mul(dy, sine(x, 2)); }
  static HWY_INLINE V value_of_16_bits(V x) { return sine_of_16_bits(x, 1); }
  static HWY_INLINE V gradient_of_16_bits(V dy, V x) { return hn::Mul(dy, sine_of_16_bits(x, 2)); }
};
/// Above 20, where PyTorch returns x, log(1 + e^-x) is below the rounding of the sum.
struct softplus {
  static HWY_INLINE V value(V x) {
    const V positive = hn::IfThenZeroElse(hn::Lt(x, zero()), x);
    return hn::Add(positive, log_of_one_plus(exponential(hn::Neg(hn::Abs(x)))));
  }
  static HWY_INLINE V gradient(V dy, V x) { return hn::Mul(dy, logistic(x).value); }
};
struct gelu_erf {
  static HWY_INLINE V value(V x) { return hn::Mul(x, normal(x).distribution); }
  static HWY_INLINE V gradient(V dy, V x) {
    const Normal n = normal(x);
    return hn::Mul(dy, hn::MulAdd(x, n.density, n.distribution));
  }
};
struct elu {
  static HWY_INLINE V value(V x, float alpha) {
    return hn::IfThenElse(hn::Lt(x, zero()), hn::Mul(constant(alpha), exponential_minus_one(x)), x);
  }
  static HWY_INLINE V gradient(V dy, V x, float alpha) {
    const V left = hn::Mul(dy, hn::Mul(constant(alpha), exponential(x)));
    return hn::IfThenElse(hn::Le(x, zero()), left, dy);
  }
};
struct leaky_relu {
  static HWY_INLINE V value(V x, float slope) { return gradient(x, x, slope); }
  static HWY_INLINE V gradient(V dy, V x, float slope) {
    return hn::IfThenElse(hn::Gt(x, zero()), dy, hn::Mul(dy, constant(slope)));
  }
};
/// The power of one operand with an exponent, and of two operands.
struct pow {
  static HWY_INLINE V value(V x, float exponent) {
    if (exponent == 1) return x;
    if (exponent == 2) return hn::Mul(x, x);
    if (exponent == 3) return hn::Mul(hn::Mul(x, x), x);
    if (exponent == 0.5f) return hn::Sqrt(x);
    if (exponent == -0.5f) return hn::Div(constant(1), hn::Sqrt(x));
    if (exponent == -1) return hn::Div(constant(1), x);
    return power(x, constant(exponent));
  }
  static HWY_INLINE V gradient(V dy, V x, float exponent) {
    if (exponent == 0) return zero();
    return hn::Mul(dy, hn::Mul(constant(exponent), value(x, exponent - 1)));
  }
  static HWY_INLINE V value(V x, V y) { return power(x, y); }
  static HWY_INLINE V first(V dy, V x, V y) {
    const V slope = hn::Mul(y, power(x, hn::Sub(y, constant(1))));
    return hn::IfThenZeroElse(hn::Eq(y, zero()), hn::Mul(dy, slope));
  }
  static HWY_INLINE V second(V dy, V x, V y) {
    const auto constant_zero = hn::And(hn::Eq(x, zero()), hn::Ge(y, zero()));
    return hn::IfThenZeroElse(constant_zero, hn::Mul(dy, hn::Mul(power(x, y), logarithm(x))));
  }
};

// ---- two operands: the value, and the gradients by dy and both

struct add {
  static HWY_INLINE V value(V x, V y) { return hn::Add(x, y); }
  static HWY_INLINE V first(V dy, V, V) { return dy; }
  static HWY_INLINE V second(V dy, V, V) { return dy; }
};
struct sub {
  static HWY_INLINE V value(V x, V y) { return hn::Sub(x, y); }
  static HWY_INLINE V first(V dy, V, V) { return dy; }
  static HWY_INLINE V second(V dy, V, V) { return hn::Neg(dy); }
};
struct mul {
  static HWY_INLINE V value(V x, V y) { return hn::Mul(x, y); }
  static HWY_INLINE V first(V dy, V, V y) { return hn::Mul(dy, y); }
  static HWY_INLINE V second(V dy, V x, V) { return hn::Mul(dy, x); }
};
struct div {
  static HWY_INLINE V value(V x, V y) { return hn::Div(x, y); }
  static HWY_INLINE V first(V dy, V, V y) { return hn::Div(dy, y); }
  static HWY_INLINE V second(V dy, V x, V y) { return hn::Mul(hn::Neg(dy), hn::Div(hn::Div(x, y), y)); }
};
struct minimum {
  static HWY_INLINE V value(V x, V y) { return not_a_number_or(x, hn::IfThenElse(hn::Lt(x, y), x, y)); }
  static HWY_INLINE V first(V dy, V x, V y) { return unless(hn::Gt(x, y), dy, x, y); }
  static HWY_INLINE V second(V dy, V x, V y) { return unless(hn::Gt(y, x), dy, x, y); }
};
struct maximum {
  static HWY_INLINE V value(V x, V y) { return not_a_number_or(x, hn::IfThenElse(hn::Gt(x, y), x, y)); }
  static HWY_INLINE V first(V dy, V x, V y) { return unless(hn::Lt(x, y), dy, x, y); }
  static HWY_INLINE V second(V dy, V x, V y) { return unless(hn::Lt(y, x), dy, x, y); }
};

/// 1 where it holds, otherwise 0.
template <class M>
HWY_INLINE V truth(M holds) {
  return hn::IfThenElseZero(holds, constant(1));
}
struct Comparison {
  static HWY_INLINE V first(V, V, V) { return zero(); }
  static HWY_INLINE V second(V, V, V) { return zero(); }
};
struct eq : Comparison {
  static HWY_INLINE V value(V x, V y) { return truth(hn::Eq(x, y)); }
};
struct ne : Comparison {
  static HWY_INLINE V value(V x, V y) { return hn::Sub(constant(1), truth(hn::Eq(x, y))); }  // 1 for NaN
};
struct lt : Comparison {
  static HWY_INLINE V value(V x, V y) { return truth(hn::Lt(x, y)); }
};
struct le : Comparison {
  static HWY_INLINE V value(V x, V y) { return truth(hn::Le(x, y)); }
};
struct gt : Comparison {
  static HWY_INLINE V value(V x, V y) { return truth(hn::Gt(x, y)); }
};
struct ge : Comparison {
  static HWY_INLINE V value(V x, V y) { return truth(hn::Ge(x, y)); }
};

}  // namespace functions
}  // namespace HWY_NAMESPACE
}  // namespace rz
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
