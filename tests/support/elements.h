#pragma once
/// Elements of any type from numbers, and back.

#include <type_traits>

#include "comm/core/math.h"

namespace rz::test {

/// The nearest element.
template <class T>
T rounded(double x) {
  if constexpr (std::is_arithmetic_v<T>)
    return static_cast<T>(x);
  else
    return from_f32<T>(static_cast<float>(x));
}

template <class T>
double widened(T x) {
  if constexpr (std::is_arithmetic_v<T>)
    return static_cast<double>(x);
  else
    return to_f32(x);
}

}  // namespace rz::test
