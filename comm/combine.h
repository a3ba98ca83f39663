#pragma once
/// How two contributions become one, element by element: written once for g++ and nvcc, so that a sum has the
/// same bits on the host and on every device. Nothing here may be contracted to a fused multiply-add.

#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "comm/core/math.h"

namespace rz::combine {

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
struct Min {  // a NaN is unequal to itself, and a comparison with one in b is false
  template <class T>
  RZ_HOST_DEVICE static T apply(T a, T b) {
    const T least = a < b ? a : b;
    return a != a ? a : least;
  }
};
struct Max {
  template <class T>
  RZ_HOST_DEVICE static T apply(T a, T b) {
    const T most = a > b ? a : b;
    return a != a ? a : most;
  }
};

/// One of the above that is known when the program runs: for code that should not be compiled for each.
struct OneOf {
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

/// Integers towards zero.
template <class T>
RZ_HOST_DEVICE T divided(T x, int divisor) {
  using Divisor = std::conditional_t<std::is_floating_point_v<T>, T, int>;
  return static_cast<T>(x / static_cast<Divisor>(divisor));
}

template <class T>
struct Limits {
  static constexpr T least = std::numeric_limits<T>::min(), most = std::numeric_limits<T>::max();
};

/// x · factor. What does not fit an integer becomes the nearest one that does.
template <class T>
RZ_HOST_DEVICE T scaled(T x, double factor) {
  if constexpr (std::is_integral_v<T>) {
    constexpr T least = Limits<T>::least, most = Limits<T>::most;
    const double product = std::nearbyint(static_cast<double>(x) * factor);
    if (product >= static_cast<double>(most)) return most;
    return product > static_cast<double>(least) ? static_cast<T>(product) : least;
  } else if constexpr (std::is_floating_point_v<T>) {
    return x * static_cast<T>(factor);
  } else {
    return from_f32<T>(to_f32(x) * static_cast<float>(factor));
  }
}

template <class Op>
inline constexpr bool ordered =
    std::is_same_v<Op, Min> || std::is_same_v<Op, Max> || std::is_same_v<Op, OneOf>;

template <class Op, class T, bool wraps = std::is_integral_v<T> && !ordered<Op>>
struct WideType {
  using type = std::conditional_t<std::is_arithmetic_v<T>, T, float>;
};
template <class Op, class T>
struct WideType<Op, T, true> {
  using type = std::make_unsigned_t<T>;
};
/// What elements of T are folded as: small floats in f32, sums and products of signed integers as those of
/// unsigned ones.
template <class Op, class T>
using Wide = typename WideType<Op, T>::type;

template <class Op, class T>
RZ_HOST_DEVICE Wide<Op, T> widened(T x) {
  if constexpr (std::is_arithmetic_v<T>)
    return static_cast<Wide<Op, T>>(x);
  else
    return to_f32(x);
}

/// The result of a fold: divided if `divisor` > 1, then rounded once.
template <class Op, class T>
RZ_HOST_DEVICE T finished(Wide<Op, T> x, int divisor) {
  if constexpr (std::is_arithmetic_v<T>) {
    const T result = static_cast<T>(x);
    return divisor > 1 ? divided(result, divisor) : result;
  } else {
    return from_f32<T>(divisor > 1 ? divided(x, divisor) : x);
  }
}

}  // namespace rz::combine
