#pragma once
/// Scalar conversions of f16, bf16, f8e4m3 and f8e5m2, shared by g++ and nvcc. Branch-free, so that loops
/// over them vectorize. Conversion to f32 is exact; conversion from f32 rounds to nearest, ties to even. NaN
/// stays NaN and keeps its sign. f16 and bf16 overflow to infinity. f8e4m3 and f8e5m2 (OCP 8-bit Floating
/// Point Specification 1.0) saturate to their largest finite value, also for infinity. Subnormals are
/// preserved. Device code uses the hardware's f16 and bf16 instructions; results are identical except for the
/// payload and sign of NaN.

#include <cstdint>
#include <cstring>

#include "comm/core/types.h"

#ifdef __CUDACC__
#define RZ_HOST_DEVICE __host__ __device__
#else
#define RZ_HOST_DEVICE
#endif

namespace rz {

namespace detail {

RZ_HOST_DEVICE inline std::uint32_t bits_of(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

RZ_HOST_DEVICE inline float float_of(std::uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

/// 2^exponent, within f32's normal range.
RZ_HOST_DEVICE inline float power_of_two(int exponent) {
  return float_of(static_cast<std::uint32_t>(127 + exponent) << 23);
}

/// A float with one sign bit, E exponent bits and M mantissa bits, and the usual bias. `infinity`: IEEE 754
/// encoding of infinity and NaN; otherwise that of E4M3, whose only NaN is all ones.
template <int E, int M, bool infinity, bool saturate>
struct SmallFloat {
  static constexpr int bias = (1 << (E - 1)) - 1;
  static constexpr std::uint32_t magnitude = (1u << (E + M)) - 1;
  static constexpr std::uint32_t all_ones_exponent = magnitude >> M << M;
  static constexpr std::uint32_t nan = infinity ? all_ones_exponent | 1u << (M - 1) : magnitude;
  static constexpr std::uint32_t largest = infinity ? all_ones_exponent - 1 : magnitude - 1;
  static constexpr std::uint32_t ceiling = saturate ? largest : largest + 1;
  /// Added to a shifted exponent field to convert its bias to that of f32.
  static constexpr std::uint32_t rebias = static_cast<std::uint32_t>(127 - bias) << 23;

  RZ_HOST_DEVICE static float widen(std::uint32_t bits) {
    const std::uint32_t rest = bits & magnitude, sign = bits >> (E + M) << 31;
    const std::uint32_t shifted = rest << (23 - M);
    const std::uint32_t subnormal =
        bits_of(static_cast<float>(static_cast<std::int32_t>(rest)) * power_of_two(1 - bias - M));
    std::uint32_t result = rest < (1u << M) ? subnormal : shifted + rebias;
    const bool special = infinity ? rest >= all_ones_exponent : rest == magnitude;
    result = special ? shifted | 0x7f800000u : result;
    return float_of(sign | result);
  }

  RZ_HOST_DEVICE static std::uint32_t narrow(float x) {
    const std::uint32_t bits = bits_of(x), rest = bits & 0x7fffffffu, sign = bits >> 31 << (E + M);
    constexpr int dropped = 23 - M;
    const std::uint32_t odd = rest >> dropped & 1;
    const std::uint32_t normal = (rest + ((1u << (dropped - 1)) - 1) + odd - rebias) >> dropped;
    // The addition rounds: the last mantissa bit of unit_last is the smallest subnormal of this format.
    const float unit_last = power_of_two(1 - bias - M + 23);
    const std::uint32_t subnormal = bits_of(float_of(rest) + unit_last) - bits_of(unit_last);
    std::uint32_t result = rest < rebias + (1u << 23) ? subnormal : normal;
    result = result > ceiling ? ceiling : result;
    result = rest > 0x7f800000u ? nan : result;
    return sign | result;
  }
};

using Half = SmallFloat<5, 10, true, false>;
using Float8E4M3 = SmallFloat<4, 3, false, true>;
using Float8E5M2 = SmallFloat<5, 2, true, true>;

RZ_HOST_DEVICE inline std::uint32_t narrow_to_bf16(float x) {
  const std::uint32_t bits = bits_of(x);
  const std::uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
  return (bits & 0x7fffffffu) > 0x7f800000u ? bits >> 16 | 0x40u : rounded;
}

}  // namespace detail

RZ_HOST_DEVICE inline float to_f32(float x) { return x; }
RZ_HOST_DEVICE inline float to_f32(f16 x) {
#ifdef __CUDA_ARCH__
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
  return wide;
#else
  return detail::Half::widen(x.bits);
#endif
}
RZ_HOST_DEVICE inline float to_f32(bf16 x) {
  return detail::float_of(static_cast<std::uint32_t>(x.bits) << 16);
}
RZ_HOST_DEVICE inline float to_f32(f8e4m3 x) { return detail::Float8E4M3::widen(x.bits); }
RZ_HOST_DEVICE inline float to_f32(f8e5m2 x) { return detail::Float8E5M2::widen(x.bits); }

template <class T>
RZ_HOST_DEVICE T from_f32(float);
template <>
RZ_HOST_DEVICE inline float from_f32<float>(float x) {
  return x;
}
template <>
RZ_HOST_DEVICE inline f16 from_f32<f16>(float x) {
#ifdef __CUDA_ARCH__
  std::uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return {bits};
#else
  return {static_cast<std::uint16_t>(detail::Half::narrow(x))};
#endif
}
template <>
RZ_HOST_DEVICE inline bf16 from_f32<bf16>(float x) {
#ifdef __CUDA_ARCH__
  std::uint16_t bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return {bits};
#else
  return {static_cast<std::uint16_t>(detail::narrow_to_bf16(x))};
#endif
}
template <>
RZ_HOST_DEVICE inline f8e4m3 from_f32<f8e4m3>(float x) {
  return {static_cast<std::uint8_t>(detail::Float8E4M3::narrow(x))};
}
template <>
RZ_HOST_DEVICE inline f8e5m2 from_f32<f8e5m2>(float x) {
  return {static_cast<std::uint8_t>(detail::Float8E5M2::narrow(x))};
}

}  // namespace rz
