#pragma once
/// A fixed amount of floating-point work in the first-level cache, similar to a matrix product. Communication
/// slows it down only by using processor time.

#include <array>
#include <cstddef>

namespace rz::bench::overlap {

class Compute {
 public:
  Compute() { values_.fill(2); }

  void run(long passes) {
    for (long p = 0; p < passes; ++p) {
      for (float& v : values_) v = v * 0.75f + 0.25f;       // converges to 1, so no denormals
      asm volatile("" : : "r"(values_.data()) : "memory");  // keeps the compiler from removing passes
    }
  }

 private:
  alignas(64) std::array<float, 2048> values_;
};

}  // namespace rz::bench::overlap
