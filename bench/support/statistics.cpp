#include "bench/support/statistics.h"

#include <algorithm>
#include <numeric>

namespace rz::bench {

Summary summarize(std::vector<double> samples, int skipped) {
  samples.erase(samples.begin(), samples.begin() + std::min<std::ptrdiff_t>(skipped, std::ssize(samples)));
  if (samples.empty()) return {};
  std::ranges::sort(samples);
  const std::size_t n = samples.size();
  const auto at = [&](std::size_t percent) { return samples[(n * percent + 99) / 100 - 1]; };
  const double mean = std::accumulate(samples.begin(), samples.end(), 0.0) / static_cast<double>(n);
  return {n, samples.front(), mean, at(50), at(99), samples.back()};
}

}  // namespace rz::bench
