#pragma once
/// Floating-point work of a fixed amount that stays in the first-level cache, as most of a matrix product
/// does: what communication takes of it is time of the processor alone.

#include <array>
#include <cstddef>

namespace rz::bench::overlap {

class Compute {
 public:
  Compute() { values_.fill(2); }

  void run(long passes) {
    for (long p = 0; p < passes; ++p) {
      for (float& v : values_) v = v * 0.75f + 0.25f;       // tends to 1: never a denormal
      asm volatile("" : : "r"(values_.data()) : "memory");  // so that no pass is left out
    }
  }

 private:
  alignas(64) std::array<float, 2048> values_;
};

}  // namespace rz::bench::overlap
