#pragma once
/// Times the variants, in turn, on two ranks.

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "bench/lower_bound/kernel.h"
#include "bench/support/statistics.h"

namespace rz::bench::lower_bound {

struct Plan {
  std::vector<std::size_t> sizes;    ///< bytes, each a multiple of 4
  std::vector<std::string> methods;  ///< of Variant::method(); empty: all but single_copy
  int iterations = 0;                ///< a round; 0: by size
  int rounds = 2;                    ///< of each variant; the variants take turns
  std::chrono::milliseconds timeout{60'000};
};

struct Timed {
  Variant variant;
  Summary us;  ///< over all rounds' iterations; each of the rank that took longer
};

/// How many iterations of the size a round has.
int iterations_for(const Plan&, std::size_t bytes);

/// Forks, and calls `report` for each size, in order, in this process. Sums are checked exactly before they
/// are timed: Errc::io if one is wrong. Errc::system if there is no memory: each rank needs four times the
/// largest size.
void measure(const Plan&, const std::function<void(std::size_t bytes, const std::vector<Timed>&)>& report);

}  // namespace rz::bench::lower_bound
