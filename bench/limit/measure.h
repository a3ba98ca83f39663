#pragma once
/// Times the ways of two ranks, in turn.

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "bench/limit/ways.h"
#include "bench/support/statistics.h"

namespace rz::bench::limit {

struct Plan {
  std::vector<std::size_t> sizes;     ///< bytes, each a multiple of 4
  std::vector<std::string> variants;  ///< of Way::variant(); none: all but single_copy
  int iterations = 0;                 ///< a round; 0: by size
  int rounds = 2;                     ///< every way's iterations are cut into so many, which take turns
  std::chrono::milliseconds timeout{60'000};
};

struct Timed {
  Way way;
  Summary us;  ///< over all rounds' iterations; of each the rank that took longest
};

/// How many iterations of the size a round has.
int iterations_for(const Plan&, std::size_t bytes);

/// Forks, and calls `report` for each size, in order, in this process. Sums are checked exactly before they
/// are timed: Errc::io if one is wrong. Errc::system if there is no memory: four times the greatest size for
/// each rank.
void measure(const Plan&, const std::function<void(std::size_t bytes, const std::vector<Timed>&)>& report);

}  // namespace rz::bench::limit
