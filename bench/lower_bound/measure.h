#pragma once
/// Times the variants on two ranks, interleaved.

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "bench/lower_bound/kernel.h"
#include "bench/support/statistics.h"

namespace rz::bench::lower_bound {

struct Plan {
  std::vector<std::size_t> sizes;    ///< bytes, each a multiple of 4
  std::vector<std::string> methods;  ///< names as from Variant::method(); empty: all but single_copy
  int iterations = 0;                ///< per round; 0: chosen by size
  int rounds = 2;                    ///< rounds of each variant; variants are interleaved
  std::chrono::milliseconds timeout{60'000};
};

struct Timed {
  Variant variant;
  Summary us;  ///< over the iterations of all rounds, each the maximum of both ranks
};

/// The number of iterations per round for a size.
int iterations_for(const Plan&, std::size_t bytes);

/// Forks a child, and calls `report` in this process for each size, in order. Sums are checked exactly before
/// the timing. Errc::io if one is wrong. Errc::system if memory is short: each rank needs four times the
/// largest size.
void measure(const Plan&, const std::function<void(std::size_t bytes, const std::vector<Timed>&)>& report);

}  // namespace rz::bench::lower_bound
