#pragma once
/// Checks and texts of optimizer options.

#include <string>

#include "comm/core/error.h"

namespace rz {

/// Errc::invalid_argument unless value >= 0.
inline void require_not_negative(const char* optimizer, const char* option, double value) {
  require(value >= 0, Errc::invalid_argument, optimizer, ": ", option, " = ", value, " must not be negative");
}

/// Errc::invalid_argument unless the decay rate of a moving average lies in [0, 1).
inline void require_moment(const char* optimizer, const char* option, double value) {
  require(value >= 0 && value < 1, Errc::invalid_argument, optimizer, ": ", option, " = ", value,
          " must lie in [0, 1)");
}

/// Decimal text that parses to the same number.
inline std::string all_digits(double x) { return rounded(x, 17); }

}  // namespace rz
