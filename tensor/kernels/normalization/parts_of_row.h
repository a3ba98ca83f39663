#pragma once
/// One row of ops::cross_entropy_of_parts(), for both compilers.

#include <cmath>
#include <cstddef>

#include "comm/core/math.h"

namespace rz::ops {

struct PartsOfRow {
  double log_sum, target;
};
/// Joins the parts of row i of statistics[parts, n, 2]. NaN if one of them is.
RZ_HOST_DEVICE inline PartsOfRow parts_of_row(const float* statistics, std::size_t i, std::size_t n,
                                              std::size_t parts) {
  float largest = -INFINITY;
  for (std::size_t p = 0; p < parts; ++p) largest = fmaxf(largest, statistics[2 * (p * n + i)]);
  double sum = 0, target = 0;
  for (std::size_t p = 0; p < parts; ++p) {
    const float* const of = statistics + 2 * (p * n + i);
    sum += exp(static_cast<double>(of[0]) - static_cast<double>(largest));
    target += static_cast<double>(of[1]);
  }
  return {static_cast<double>(largest) + log(sum), target};
}

}  // namespace rz::ops
