#pragma once
/// Means over samples that are spread over ranks.

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
  /// NaN without terms.
  double value() const { return sum / count; }
};

}  // namespace rz
