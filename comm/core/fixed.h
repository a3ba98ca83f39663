#pragma once
/// Numbers in reports.

#include <string>

namespace rz {

/// With this number of decimals, rounded to nearest: fixed(0.128, 2) is "0.13".
std::string fixed(double value, int decimals);

}  // namespace rz
