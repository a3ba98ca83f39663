#pragma once
/// Whole parts of numbers.

#include <cstddef>

namespace rz {

/// n / by, rounded up; `by` is not 0.
constexpr std::size_t ceil_div(std::size_t n, std::size_t by) { return (n + by - 1) / by; }
/// The least multiple of `to`, which is not 0, that is n at least.
constexpr std::size_t round_up(std::size_t n, std::size_t to) { return ceil_div(n, to) * to; }

}  // namespace rz
