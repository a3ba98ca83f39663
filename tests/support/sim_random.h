#pragma once
/// The random numbers of a simulated network. Equal on all machines for a seed.

#include <cstdint>
#include <random>

#include "tests/support/sim_clock.h"

namespace rz::test {

/// Source of all random decisions of a network.
class SimRandom {
 public:
  explicit SimRandom(std::uint64_t seed) : engine_(seed) {}
  /// 0 … n-1.
  std::uint64_t below(std::uint64_t n) { return engine_() % n; }
  /// 0 … max.
  SimTime delay(SimTime max) { return SimTime(below(static_cast<std::uint64_t>(max.count()) + 1)); }

 private:
  std::mt19937_64 engine_;
};

}  // namespace rz::test
