#pragma once
/// Dropout parameters in the form that kernels use.

#include <cmath>
#include <cstdint>

#include "comm/core/error.h"
#include "comm/core/math.h"
#include "tensor/ops.h"

namespace rz::kernels {

/// An element is dropped if its random word is below `threshold`; otherwise it is multiplied by `factor`.
struct DropoutParams {
  std::uint32_t threshold;
  float factor;
  std::uint64_t seed;
  const std::uint64_t* seed_at;
  std::uint64_t offset, run, stride;  ///< as in ops::DropoutMask
  /// Call it on the device of the operands before using `seed`.
  RZ_HOST_DEVICE void read_seed() {
    if (seed_at) seed = *seed_at;
  }
  bool active() const { return threshold > 0; }
  /// Index of the decision on element i. Those of a run follow each other.
  RZ_HOST_DEVICE std::uint64_t decision(std::uint64_t i) const {
    return offset + (run ? i / run * stride + i % run : i);
  }
};

inline DropoutParams dropout_params(const char* op, const ops::DropoutMask& mask) {
  if (!(mask.p >= 0 && mask.p < 1)) fail(Errc::invalid_argument, op, ": p = ", mask.p, " must lie in [0, 1)");
  return {static_cast<std::uint32_t>(std::ldexp(static_cast<double>(mask.p), 32)),
          1 / (1 - mask.p),
          mask.seed,
          mask.seed_at,
          mask.offset,
          mask.run,
          mask.stride};
}

}  // namespace rz::kernels
