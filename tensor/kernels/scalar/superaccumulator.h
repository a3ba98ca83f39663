#pragma once
/// Exact sums of doubles (superaccumulator). Host and device use the same arithmetic, so both get the same
/// sum; its use is described at ExactSum in sharding/optim/grad_norm.h.

#include <cmath>
#include <cstdint>
#include <cstring>

#include "comm/core/math.h"

namespace rz {

/// An exact sum is an array of `words` int64. Limb i has weight 2^(32 i - 1074). Each limb has 32 spare bits
/// for carries, so up to 2^30 numbers may be added in any order before carries must be propagated. The limbs
/// are followed by the counts of NaNs and infinities.
struct ExactLayout {
  static constexpr int limbs = 67;  // the largest double ends in limb 65; one more for carries
  enum { not_a_number = limbs, plus_infinity, minus_infinity, words };
};

/// Contribution of one double: part[i] is added to word `first` + i. A double that is not finite adds 1 to
/// one word.
struct ExactParts {
  int first;
  std::int64_t part[3];
};

RZ_HOST_DEVICE inline ExactParts exact_parts(double x) {
  std::uint64_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const auto exponent = static_cast<int>(bits >> 52 & 0x7ff);
  const std::uint64_t fraction = bits & ((std::uint64_t{1} << 52) - 1);
  const bool negative = bits >> 63;
  if (exponent == 0x7ff)
    return {fraction   ? ExactLayout::not_a_number
            : negative ? ExactLayout::minus_infinity
                       : ExactLayout::plus_infinity,
            {1, 0, 0}};
  const std::uint64_t mantissa = exponent ? fraction | std::uint64_t{1} << 52 : fraction;
  const int shift = exponent ? exponent - 1 : 0;  // x = mantissa · 2^(shift - 1074)
  const int within = shift % 32;
  const std::uint64_t low = mantissa << within, high = within ? mantissa >> (64 - within) : 0;
  const std::int64_t sign = negative ? -1 : 1;
  return {shift / 32,
          {sign * static_cast<std::int64_t>(low & 0xffffffffu), sign * static_cast<std::int64_t>(low >> 32),
           sign * static_cast<std::int64_t>(high)}};
}

/// Propagates carries: afterwards every limb has 32 bits, except the last, which has the sign.
RZ_HOST_DEVICE inline void propagate_carries(std::int64_t (&word)[ExactLayout::words]) {
  for (int i = 0; i + 1 < ExactLayout::limbs; ++i) {
    word[i + 1] += word[i] >> 32;
    word[i] &= 0xffffffff;
  }
}

/// The sum, rounded to nearest even; NaN and infinities as in ordinary addition. Overwrites `word`.
RZ_HOST_DEVICE inline double exact_value(std::int64_t (&word)[ExactLayout::words]) {
  const bool up = word[ExactLayout::plus_infinity] != 0, down = word[ExactLayout::minus_infinity] != 0;
  if (word[ExactLayout::not_a_number] || (up && down)) return NAN;
  if (up || down) return up ? INFINITY : -INFINITY;

  propagate_carries(word);
  const bool negative = word[ExactLayout::limbs - 1] < 0;
  if (negative) {
    for (int i = 0; i < ExactLayout::limbs; ++i) word[i] = -word[i];
    propagate_carries(word);
  }
  int top = ExactLayout::limbs - 1;
  while (top >= 0 && word[top] == 0) --top;
  if (top < 0) return 0;

  // The upper three limbs hold at least 65 bits. Their top 64 bits, with all lower bits ORed into the last
  // one (sticky bit), round to double as the exact sum does. Results below 2^-1022 are exact: every sum is a
  // multiple of the smallest double.
  const std::uint64_t first = static_cast<std::uint64_t>(word[top]);
  const std::uint64_t second = top > 0 ? static_cast<std::uint64_t>(word[top - 1]) : 0;
  const std::uint64_t third = top > 1 ? static_cast<std::uint64_t>(word[top - 2]) : 0;
  int spare = 1;  // significant bits of the first limb: 1 to 63
  while (first >> spare) ++spare;
  // first · 2^64 + second · 2^32 + third, without its lowest `spare` bits.
  const std::uint64_t lower = second << 32 | third;
  std::uint64_t kept = first << (64 - spare) | lower >> spare;
  bool rest = lower << (64 - spare) != 0;
  for (int i = top - 3; i >= 0; --i) rest = rest || word[i] != 0;
  kept |= static_cast<std::uint64_t>(rest);
  const double magnitude = std::ldexp(static_cast<double>(kept), 32 * (top - 2) + spare - 1074);
  return negative ? -magnitude : magnitude;
}

}  // namespace rz
