// Plain loops, which Highway has compiled once a target and the compiler makes vector code of. Nothing is
// contracted to a fused multiply-add (see CMakeLists.txt), and sums are cut into lanes by hand, so that every
// target gives the same bits.

#include "sharding/update_kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "sharding/update_kernels.cpp"
#ifndef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)  // leaves AVX-512, AVX2 and the portable one
#endif
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <cmath>

HWY_BEFORE_NAMESPACE();
namespace rz::kernels {
namespace HWY_NAMESPACE {

void sgd(float* __restrict p, const float* __restrict g, float* __restrict m, std::size_t count,
         const SgdFactors& f) {
  const auto [rate, momentum, decay, grad_scale, nesterov] = f;
  if (!m) {
    for (std::size_t i = 0; i < count; ++i) p[i] -= rate * (g[i] * grad_scale + decay * p[i]);
  } else if (nesterov) {
    for (std::size_t i = 0; i < count; ++i) {
      const float d = g[i] * grad_scale + decay * p[i];
      m[i] = momentum * m[i] + d;
      p[i] -= rate * (d + momentum * m[i]);
    }
  } else {
    for (std::size_t i = 0; i < count; ++i) {
      m[i] = momentum * m[i] + (g[i] * grad_scale + decay * p[i]);
      p[i] -= rate * m[i];
    }
  }
}

void adam(float* __restrict p, const float* __restrict g, float* __restrict m, float* __restrict v,
          std::size_t count, const AdamFactors& factors) {
  const AdamFactors f = factors;
  for (std::size_t i = 0; i < count; ++i) {
    const float d = g[i] * f.grad_scale + f.l2 * p[i];
    m[i] = f.beta1 * m[i] + f.rest1 * d;
    v[i] = f.beta2 * v[i] + f.rest2 * d * d;
    p[i] = p[i] * f.keep - f.rate * m[i] / (std::sqrt(v[i]) * f.inverse_correction2 + f.epsilon);
  }
}

/// Products of floats are exact in double. Eight sums, then these in a fixed tree.
void sums_of_squares(const float* __restrict x, std::size_t blocks, double* __restrict out) {
  for (std::size_t b = 0; b < blocks; ++b, x += 64) {
    double lane[8] = {};
    for (std::size_t i = 0; i < 64; i += 8)
      for (std::size_t k = 0; k < 8; ++k) lane[k] += static_cast<double>(x[i + k]) * x[i + k];
    out[b] = ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace rz::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace rz::kernels {

HWY_EXPORT(sgd);
HWY_EXPORT(adam);
HWY_EXPORT(sums_of_squares);

void sgd(float* p, const float* g, float* m, std::size_t count, const SgdFactors& f) {
  HWY_DYNAMIC_DISPATCH(sgd)(p, g, m, count, f);
}
void adam(float* p, const float* g, float* m, float* v, std::size_t count, const AdamFactors& f) {
  HWY_DYNAMIC_DISPATCH(adam)(p, g, m, v, count, f);
}
void sums_of_squares(const float* x, std::size_t blocks, double* out) {
  HWY_DYNAMIC_DISPATCH(sums_of_squares)(x, blocks, out);
}

}  // namespace rz::kernels
#endif
