#pragma once
/// Means over samples that are spread over ranks.

#include <cmath>
#include <limits>

namespace rz {

/// A sum and the number of its terms. The mean of all ranks is World::reduce(): sum of sums over sum of
/// counts, so that ranks with more terms weigh more.
struct Mean {
  double sum = 0, count = 0;

  /// Adds `n` terms whose mean is `value`.
  void add(double value, double n = 1) {
    sum += value * n;
    count += n;
  }
  void add(const Mean& other) {
    sum += other.sum;
    count += other.count;
  }
  /// NaN without terms. A NaN has no sign, which programs would print: "nan", not "-nan".
  double value() const {
    const double mean = sum / count;
    return std::isnan(mean) ? std::numeric_limits<double>::quiet_NaN() : mean;
  }
};

}  // namespace rz
