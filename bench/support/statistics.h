#pragma once
/// Summary statistics of samples.

#include <cstddef>
#include <vector>

namespace rz::bench {

struct Summary {
  std::size_t count = 0;
  double min = 0, mean = 0, p50 = 0, p99 = 0, max = 0;
};

/// Summarizes the samples after the first `skipped`; all zero if none remain. Percentiles are samples, by
/// nearest rank: p99 is the smallest sample that at least 99% do not exceed (with fewer than 100 samples the
/// largest).
Summary summarize(std::vector<double> samples, int skipped = 0);

}  // namespace rz::bench
