#pragma once
/// Integer rounding.

#include <cstddef>

namespace rz {

/// n / by, rounded up. Requires by > 0.
constexpr std::size_t ceil_div(std::size_t n, std::size_t by) { return (n + by - 1) / by; }
/// The smallest multiple of `to` that is >= n. Requires to > 0.
constexpr std::size_t round_up(std::size_t n, std::size_t to) { return ceil_div(n, to) * to; }

}  // namespace rz
