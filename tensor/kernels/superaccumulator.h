#pragma once
/// A double as a part of an exact sum: what host and device add, so that both make the same sum (ExactSum in
/// sharding/optim/grad_norm.h says what it is good for).

#include <cmath>
#include <cstdint>
#include <cstring>

#include "comm/core/math.h"

namespace rz {

/// An exact sum is `words` int64. Limb i weighs 2^(32 i - 1074); the upper half of each takes up carries, so
/// that up to 2^30 numbers may be added, in any order, before carries are passed on. Behind the limbs stand
/// the numbers of NaNs and infinities.
struct ExactLayout {
  static constexpr int limbs = 67;  // the largest double ends in limb 65; one more for sums of many
  enum { not_a_number = limbs, plus_infinity, minus_infinity, words };
};

/// What a double adds: part[i] to word `first` + i; of those that are not finite, 1 to one word.
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

/// Leaves 32 bits in every limb but the last, which keeps the sign.
RZ_HOST_DEVICE inline void propagate_carries(std::int64_t (&word)[ExactLayout::words]) {
  for (int i = 0; i + 1 < ExactLayout::limbs; ++i) {
    word[i + 1] += word[i] >> 32;
    word[i] &= 0xffffffff;
  }
}

/// The sum, correctly rounded to nearest even; NaN and infinities as in ordinary addition. Uses up `word`.
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

  // The upper three limbs hold at least 65 bits. 64 of them, the last one standing for everything below, are
  // rounded by the conversion to double as the whole would be. Below 2^-1022 nothing is rounded: every sum is
  // a multiple of the smallest double.
  const std::uint64_t first = static_cast<std::uint64_t>(word[top]);
  const std::uint64_t second = top > 0 ? static_cast<std::uint64_t>(word[top - 1]) : 0;
  const std::uint64_t third = top > 1 ? static_cast<std::uint64_t>(word[top - 2]) : 0;
  int spare = 1;  // bits of the first limb: from 1 to 63
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
