#pragma once
/// A double as a part of an exact sum: what host and device add, so that both make the same sum (ExactSum in
/// sharding/grad_norm.h says what it is good for).

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

}  // namespace rz
