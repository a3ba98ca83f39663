#pragma once
/// A sum over [0, n) whose value does not depend on the number of threads.

#include <array>
#include <cstddef>

#include "comm/device/stream.h"

namespace rz::ops {

/// Sums part(begin, end), in order, over up to 64 ranges that depend on n only.
template <class F>
double ordered_sum(std::size_t n, const Stream& stream, const F& part) {
  std::array<double, 64> parts{};
  stream.parallel_for(parts.size(), 1, [&](std::size_t first, std::size_t past) {
    for (std::size_t i = first; i < past; ++i) {
      const std::size_t begin = n * i / parts.size(), end = n * (i + 1) / parts.size();
      if (begin < end) parts[i] = part(begin, end);
    }
  });
  double sum = 0;
  for (const double p : parts) sum += p;
  return sum;
}

}  // namespace rz::ops
