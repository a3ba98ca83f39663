#pragma once
/// Scalar reduction operators, written once for g++ and nvcc, so that a sum has the same bits on the host and
/// on every device. Compile without contraction to fused multiply-add.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "comm/core/math.h"

namespace rz::elementwise {

struct Sum {
  template <class T>
  RZ_HOST_DEVICE static T apply(T a, T b) {
    return static_cast<T>(a + b);
  }
};
struct Product {
  template <class T>
  RZ_HOST_DEVICE static T apply(T a, T b) {
    return static_cast<T>(a * b);
  }
};

/// Unsigned integer of a float's size; as_bits() converts between the two.
template <class T>
using Bits = std::conditional_t<sizeof(T) == 8, std::uint64_t, std::uint32_t>;
template <class To, class From>
RZ_HOST_DEVICE To as_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

/// The NaN that replaces every NaN: quiet, without sign and payload.
template <class T>
RZ_HOST_DEVICE T canonical_nan() {
  return as_bits<T>(sizeof(T) == 8 ? static_cast<Bits<T>>(0x7ff8000000000000u)
                                   : static_cast<Bits<T>>(0x7fc00000u));
}

/// min and max: -0 is less than +0, and any NaN gives the canonical one. So the result does not depend on the
/// order of the contributions, and all processors produce the same bits.
struct Min {
  template <class T>
  RZ_HOST_DEVICE static T apply(T a, T b) {
    const T x = a < b ? a : b, y = b < a ? b : a;
    if constexpr (!std::is_floating_point_v<T>) {
      return x;
    } else {
      const auto both = as_bits<Bits<T>>(x) | as_bits<Bits<T>>(y);
      return x != y ? canonical_nan<T>() : as_bits<T>(both);
    }
  }
};
struct Max {
  template <class T>
  RZ_HOST_DEVICE static T apply(T a, T b) {
    const T x = a > b ? a : b, y = b > a ? b : a;
    if constexpr (!std::is_floating_point_v<T>) {
      return x;
    } else {
      const auto both = as_bits<Bits<T>>(x) & as_bits<Bits<T>>(y);
      return x != y ? canonical_nan<T>() : as_bits<T>(both);
    }
  }
};

/// One of the above, selected at run time: for code that is not instantiated for each operation.
struct RuntimeOp {
  enum Which { product, min, max } which;
  template <class T>
  RZ_HOST_DEVICE T apply(T a, T b) const {
    if (which == min) return Min::apply(a, b);
    if (which == max) return Max::apply(a, b);
    if constexpr (std::is_integral_v<T>) {
      using U = std::make_unsigned_t<T>;
      return static_cast<T>(Product::apply(static_cast<U>(a), static_cast<U>(b)));
    } else {
      return Product::apply(a, b);
    }
  }
};

/// The factors of an average of floats over `ranks` (comm/reduce/reduce.h, AverageStep): each contribution is
/// multiplied by `scale`, 1 over the first power of two that is not less than `ranks`, and the sum divided by
/// `rest` = ranks · scale.
struct MeanFactors {
  int ranks;
  float scale = 1, rest = 1;
  RZ_HOST_DEVICE explicit MeanFactors(int n) : ranks(n) {
    while (scale * static_cast<float>(n) > 1) scale /= 2;
    rest = scale * static_cast<float>(n);
  }
};

/// The average, given the sum. Integers round towards zero.
template <class T>
RZ_HOST_DEVICE T divide(T sum, const MeanFactors& mean) {
  if constexpr (std::is_floating_point_v<T>)
    return sum / static_cast<T>(mean.rest);
  else
    return static_cast<T>(sum / mean.ranks);
}

template <class T>
struct Limits {
  static constexpr T min = std::numeric_limits<T>::min(), max = std::numeric_limits<T>::max();
};

/// x · factor. Integers saturate.
template <class T>
RZ_HOST_DEVICE T scale(T x, double factor) {
  if constexpr (std::is_integral_v<T>) {
    constexpr T min = Limits<T>::min, max = Limits<T>::max;
    const double product = std::nearbyint(static_cast<double>(x) * factor);
    if (product >= static_cast<double>(max)) return max;
    return product > static_cast<double>(min) ? static_cast<T>(product) : min;
  } else if constexpr (std::is_floating_point_v<T>) {
    return x * static_cast<T>(factor);
  } else {
    return from_f32<T>(to_f32(x) * static_cast<float>(factor));
  }
}

template <class Op>
inline constexpr bool ordered =
    std::is_same_v<Op, Min> || std::is_same_v<Op, Max> || std::is_same_v<Op, RuntimeOp>;

template <class Op, class T, bool wraps = std::is_integral_v<T> && !ordered<Op>>
struct WideType {
  using type = std::conditional_t<std::is_arithmetic_v<T>, T, float>;
};
template <class Op, class T>
struct WideType<Op, T, true> {
  using type = std::make_unsigned_t<T>;
};
/// Type in which elements of T are reduced: f32 for 16- and 8-bit floats, and the unsigned type for sums and
/// products of signed integers, so that overflow is defined.
template <class Op, class T>
using Accumulator = typename WideType<Op, T>::type;

template <class Op, class T>
RZ_HOST_DEVICE Accumulator<Op, T> widen(T x) {
  if constexpr (std::is_arithmetic_v<T>)
    return static_cast<Accumulator<Op, T>>(x);
  else
    return to_f32(x);
}
/// A contribution to an average, or to another reduction if mean.ranks is 1.
template <class Op, class T>
RZ_HOST_DEVICE Accumulator<Op, T> widen(T x, const MeanFactors& mean) {
  const auto wide = widen<Op>(x);
  if constexpr (std::is_same_v<Op, Sum> && std::is_floating_point_v<Accumulator<Op, T>>)
    return mean.ranks > 1 ? wide * static_cast<Accumulator<Op, T>>(mean.scale) : wide;
  else
    return wide;
}

/// Result of a reduction: an average if mean.ranks is more than 1, then rounded once.
template <class Op, class T>
RZ_HOST_DEVICE T narrow(Accumulator<Op, T> x, const MeanFactors& mean) {
  if constexpr (std::is_arithmetic_v<T>) {
    const T result = static_cast<T>(x);
    return mean.ranks > 1 ? divide(result, mean) : result;
  } else {
#ifdef __CUDA_ARCH__  // the device's conversion gives another NaN
    if constexpr (ordered<Op> && sizeof(T) == 2)
      if (x != x) return {std::is_same_v<T, f16> ? std::uint16_t{0x7e00} : std::uint16_t{0x7fc0}};
#endif
    return from_f32<T>(mean.ranks > 1 ? divide(x, mean) : x);
  }
}

}  // namespace rz::elementwise
