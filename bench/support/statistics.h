#pragma once
/// Many times in a few numbers.

#include <cstddef>
#include <vector>

namespace rz::bench {

struct Summary {
  std::size_t count = 0;
  double least = 0, mean = 0, p50 = 0, p99 = 0, worst = 0;
};

/// Of the samples after the first `skipped`; all zero if none is left. Percentiles are samples, by nearest
/// rank: p99 is the least of them that at least 99% do not exceed (of fewer than 100 the worst).
Summary summarize(std::vector<double> samples, int skipped = 0);

}  // namespace rz::bench
