// Runs: ci pure

#include "comm/core/math.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <vector>

namespace rz {
namespace {

/// The value of a small float as a number: the reference uses no bit operations.
template <class T>
struct Format;
template <>
struct Format<f16> {
  static constexpr int bits = 16, exponent = 5, mantissa = 10;
  static constexpr bool infinity = true, saturate = false;
};
template <>
struct Format<bf16> {
  static constexpr int bits = 16, exponent = 8, mantissa = 7;
  static constexpr bool infinity = true, saturate = false;
};
template <>
struct Format<f8e4m3> {
  static constexpr int bits = 8, exponent = 4, mantissa = 3;
  static constexpr bool infinity = false, saturate = true;
};
template <>
struct Format<f8e5m2> {
  static constexpr int bits = 8, exponent = 5, mantissa = 2;
  static constexpr bool infinity = true, saturate = true;
};

template <class T>
T pattern(unsigned bits) {
  return {static_cast<decltype(T::bits)>(bits)};
}

/// sign · 1.mantissa · 2^(exponent - bias), by definition.
template <class T>
double decode(unsigned bits) {
  using F = Format<T>;
  const int bias = (1 << (F::exponent - 1)) - 1, top = (1 << F::exponent) - 1;
  const double sign = bits >> (F::bits - 1) ? -1 : 1;
  const int exponent = static_cast<int>(bits >> F::mantissa) & top;
  const unsigned mantissa = bits & ((1u << F::mantissa) - 1), ones = (1u << F::mantissa) - 1;
  if (exponent == top && F::infinity)
    return mantissa ? std::numeric_limits<double>::quiet_NaN()
                    : sign * std::numeric_limits<double>::infinity();
  if (exponent == top && mantissa == ones) return std::numeric_limits<double>::quiet_NaN();
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - F::mantissa);
  return sign * std::ldexp((1u << F::mantissa) + mantissa, exponent - bias - F::mantissa);
}

/// The patterns 0 … largest finite value, which are in ascending order.
template <class T>
unsigned finite_patterns() {
  unsigned n = 0;
  while (std::isfinite(decode<T>(n))) ++n;
  return n;
}

template <class T>
class SmallFloats : public testing::Test {};
using Types = testing::Types<f16, bf16, f8e4m3, f8e5m2>;
TYPED_TEST_SUITE(SmallFloats, Types);

TYPED_TEST(SmallFloats, EveryPatternWidensExactlyAndComesBack) {
  for (unsigned bits = 0; bits < 1u << Format<TypeParam>::bits; ++bits) {
    const float x = to_f32(pattern<TypeParam>(bits));
    const double expected = decode<TypeParam>(bits);
    const unsigned back = from_f32<TypeParam>(x).bits;
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(x)) << bits;
      ASSERT_TRUE(std::isnan(decode<TypeParam>(back))) << bits;
      ASSERT_EQ(back >> (Format<TypeParam>::bits - 1), bits >> (Format<TypeParam>::bits - 1)) << bits;
    } else {
      ASSERT_EQ(x, expected) << bits;
      ASSERT_EQ(std::signbit(x), std::signbit(expected)) << bits;
      const bool saturated = Format<TypeParam>::saturate && std::isinf(expected);
      ASSERT_TRUE(saturated || back == bits) << bits;
    }
  }
}

TYPED_TEST(SmallFloats, RoundsToNearestTiesToEven) {
  const unsigned n = finite_patterns<TypeParam>();
  for (unsigned low = 0; low + 1 < n; ++low) {
    const auto middle = static_cast<float>((decode<TypeParam>(low) + decode<TypeParam>(low + 1)) / 2);
    const float below = std::nextafter(middle, 0.0f), above = std::nextafter(middle, INFINITY);
    const unsigned even = low % 2 == 0 ? low : low + 1, sign = 1u << (Format<TypeParam>::bits - 1);
    ASSERT_EQ(from_f32<TypeParam>(middle).bits, even) << low;
    ASSERT_EQ(from_f32<TypeParam>(-middle).bits, even | sign) << low;
    ASSERT_EQ(from_f32<TypeParam>(below).bits, low) << low;
    ASSERT_EQ(from_f32<TypeParam>(above).bits, low + 1) << low;
  }
}

TYPED_TEST(SmallFloats, OverflowsAsDocumented) {
  const unsigned n = finite_patterns<TypeParam>(), infinity = n;
  const double largest = decode<TypeParam>(n - 1), step = largest - decode<TypeParam>(n - 2);
  const unsigned beyond = Format<TypeParam>::saturate ? n - 1 : infinity;
  const auto limit = static_cast<float>(largest + step / 2);  // the first that is rounded away
  EXPECT_EQ(from_f32<TypeParam>(std::nextafter(limit, 0.0f)).bits, n - 1);
  EXPECT_EQ(from_f32<TypeParam>(limit).bits, beyond);
  EXPECT_EQ(from_f32<TypeParam>(std::numeric_limits<float>::max()).bits, beyond);
  EXPECT_EQ(from_f32<TypeParam>(std::numeric_limits<float>::infinity()).bits, beyond);
  const unsigned sign = 1u << (Format<TypeParam>::bits - 1);
  EXPECT_EQ(from_f32<TypeParam>(-std::numeric_limits<float>::infinity()).bits, sign | beyond);
}

TYPED_TEST(SmallFloats, TinyNumbersBecomeZeroWithTheirSign) {
  if (Format<TypeParam>::exponent == 8) return;  // bf16 has the exponents of f32
  const float tiny = std::numeric_limits<float>::denorm_min();
  EXPECT_EQ(from_f32<TypeParam>(tiny).bits, 0u);
  EXPECT_EQ(from_f32<TypeParam>(-tiny).bits, 1u << (Format<TypeParam>::bits - 1));
}

TYPED_TEST(SmallFloats, EveryNanStaysNan) {
  for (unsigned bits : {0x7f800001u, 0x7fc00000u, 0x7fffffffu, 0xff800001u, 0xffffffffu})
    EXPECT_TRUE(std::isnan(to_f32(from_f32<TypeParam>(std::bit_cast<float>(bits))))) << bits;
}

TEST(SmallFloatsKnown, ValuesOfTheSpecification) {
  EXPECT_EQ(to_f32(f8e4m3{0x7e}), 448.0f);
  EXPECT_EQ(to_f32(f8e4m3{0x01}), 0.001953125f);
  EXPECT_TRUE(std::isnan(to_f32(f8e4m3{0x7f})));
  EXPECT_EQ(from_f32<f8e4m3>(NAN).bits, 0x7f);
  EXPECT_EQ(from_f32<f8e4m3>(1e9f).bits, 0x7e);
  EXPECT_EQ(to_f32(f8e5m2{0x7b}), 57344.0f);
  EXPECT_EQ(to_f32(f8e5m2{0x7c}), INFINITY);
  EXPECT_EQ(from_f32<f8e5m2>(INFINITY).bits, 0x7b);
  EXPECT_EQ(to_f32(f16{0x7bff}), 65504.0f);
  EXPECT_EQ(from_f32<f16>(65520.0f).bits, 0x7c00);
  EXPECT_EQ(from_f32<f16>(1.0f).bits, 0x3c00);
  EXPECT_EQ(from_f32<bf16>(1.0f).bits, 0x3f80);
}

}  // namespace
}  // namespace rz
