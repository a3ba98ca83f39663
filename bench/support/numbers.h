#pragma once
/// Printing of numbers as in nccl-tests.

#include <string>

namespace rz::bench {

/// At least `width` characters, right-aligned: with two decimals, one, none, or an exponent, the first that
/// fits.
std::string fit(double value, int width);
inline std::string fit_time(double us) { return fit(us, 7); }
inline std::string fit_bandwidth(double gb_per_s) { return fit(gb_per_s, 6); }

/// printf to a string.
[[gnu::format(printf, 1, 2)]] std::string format(const char* pattern, ...);

}  // namespace rz::bench
