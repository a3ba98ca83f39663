#pragma once
/// Checks and texts of optimizer options.

#include <cmath>
#include <limits>
#include <string>

#include "comm/core/error.h"

namespace rz {

/// Errc::invalid_argument unless the value is finite in f32, in which updates are computed.
inline void require_finite(const char* optimizer, const char* option, double value) {
  require(std::abs(value) <= std::numeric_limits<float>::max(), Errc::invalid_argument, optimizer, ": ",
          option, " = ", value, " is not finite in f32, in which updates are computed");
}

/// Errc::invalid_argument unless value >= 0, and finite in f32.
inline void require_not_negative(const char* optimizer, const char* option, double value) {
  require(!(value < 0), Errc::invalid_argument, optimizer, ": ", option, " = ", value,
          " must not be negative");
  require_finite(optimizer, option, value);
}

/// Errc::invalid_argument unless the decay rate of a moving average lies in [0, 1).
inline void require_moment(const char* optimizer, const char* option, double value) {
  require(value >= 0 && value < 1, Errc::invalid_argument, optimizer, ": ", option, " = ", value,
          " must lie in [0, 1)");
}

/// Factor of the gradients of an optimizer that maximizes the loss, or minimizes it.
inline float sign_of(bool maximize) { return maximize ? -1.0f : 1.0f; }

/// Decimal text that parses to the same number.
inline std::string all_digits(double x) { return rounded(x, 17); }

}  // namespace rz
