// Plain loops. Highway compiles this file once per target, and the compiler vectorizes them without
// contraction to fused multiply-adds (see tensor/CMakeLists.txt).

#include "tensor/kernels/optimizer.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tensor/kernels/optimizer.cpp"
#include "tensor/kernels/targets.h"
// after the targets
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <cfloat>
#include <cmath>

#include "tensor/kernels/adam_factors.h"
#include "tensor/kernels/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace rz {
namespace HWY_NAMESPACE {

/// NaN stays NaN.
HWY_INLINE FloatVector flush_subnormal(FloatVector x) {
  return hn::IfThenZeroElse(hn::Lt(hn::Abs(x), hn::Set(Floats(), FLT_MIN)), x);
}

void adam_all(float* HWY_RESTRICT p, const float* HWY_RESTRICT g, float* HWY_RESTRICT m,
              float* HWY_RESTRICT v, std::size_t n, kernels::AdamFactors f) {
  const Floats d;
  const auto update = [&](FloatVector& w, FloatVector grad, FloatVector& first,
                          FloatVector& second) HWY_ATTR {
    grad = hn::Add(hn::Mul(grad, hn::Set(d, f.scale)), hn::Mul(hn::Set(d, f.l2), w));
    first = flush_subnormal(hn::Add(hn::Mul(hn::Set(d, f.beta1), first), hn::Mul(hn::Set(d, f.rest1), grad)));
    second = flush_subnormal(
        hn::Add(hn::Mul(hn::Set(d, f.beta2), second), hn::Mul(hn::Mul(hn::Set(d, f.rest2), grad), grad)));
    const auto root = hn::Add(hn::Mul(hn::Sqrt(second), hn::Set(d, f.correction)), hn::Set(d, f.eps));
    w = hn::Sub(hn::Mul(w, hn::Set(d, f.keep)), hn::Div(hn::Mul(hn::Set(d, f.rate), first), root));
  };
  const std::size_t lanes = hn::Lanes(d);
  std::size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    FloatVector w = hn::LoadU(d, p + i), first = hn::LoadU(d, m + i), second = hn::LoadU(d, v + i);
    update(w, hn::LoadU(d, g + i), first, second);
    hn::StoreU(w, d, p + i), hn::StoreU(first, d, m + i), hn::StoreU(second, d, v + i);
  }
  if (i == n) return;
  const std::size_t left = n - i;
  FloatVector w = load_part(d, p + i, left, 0), first = load_part(d, m + i, left, 0),
              second = load_part(d, v + i, left, 0);
  update(w, load_part(d, g + i, left, 0), first, second);
  store_part(w, d, p + i, left), store_part(first, d, m + i, left), store_part(second, d, v + i, left);
}

void sgd_all(float* HWY_RESTRICT p, const float* HWY_RESTRICT g, std::size_t n, kernels::SgdStep s) {
  for (std::size_t i = 0; i < n; ++i) p[i] -= s.lr * (g[i] * s.grad_scale + s.weight_decay * p[i]);
}

template <bool first, bool nesterov>
void momentum_as(float* HWY_RESTRICT p, const float* HWY_RESTRICT g, float* HWY_RESTRICT buf, std::size_t n,
                 kernels::SgdStep s) {
  for (std::size_t i = 0; i < n; ++i) {
    const float grad = g[i] * s.grad_scale + s.weight_decay * p[i];
    const float sum = first ? grad : s.momentum * buf[i] + grad;
    const float b = std::fabs(sum) < FLT_MIN ? 0 : sum;
    buf[i] = b;
    p[i] -= s.lr * (nesterov ? grad + s.momentum * b : b);
  }
}

void momentum_all(float* p, const float* g, float* buf, std::size_t n, kernels::SgdStep s) {
  if (s.first)
    s.nesterov ? momentum_as<true, true>(p, g, buf, n, s) : momentum_as<true, false>(p, g, buf, n, s);
  else
    s.nesterov ? momentum_as<false, true>(p, g, buf, n, s) : momentum_as<false, false>(p, g, buf, n, s);
}

// Sums eight columns of eight, adds these to four sums, then pairs. The order is explicit, so that it does
// not depend on the vector width.
void squares_all(const float* x, std::size_t blocks, double* out) {
  for (std::size_t b = 0; b < blocks; ++b, x += 64) {
    double column[8] = {};
    for (std::size_t row = 0; row < 64; row += 8)
      for (std::size_t j = 0; j < 8; ++j) {
        const double value = x[row + j];
        column[j] += value * value;
      }
    for (std::size_t j = 0; j < 4; ++j) column[j] += column[j + 4];
    out[b] = (column[0] + column[1]) + (column[2] + column[3]);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace rz
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace rz {

HWY_EXPORT(adam_all);
HWY_EXPORT(sgd_all);
HWY_EXPORT(momentum_all);
HWY_EXPORT(squares_all);

namespace kernels {

void adamw(float* p, const float* g, float* m, float* v, std::size_t n, const AdamStep& s) {
  HWY_DYNAMIC_DISPATCH(adam_all)(p, g, m, v, n, factors(s, true));
}

void adam(float* p, const float* g, float* m, float* v, std::size_t n, const AdamStep& s) {
  HWY_DYNAMIC_DISPATCH(adam_all)(p, g, m, v, n, factors(s, false));
}

void sgd_momentum(float* p, const float* g, float* buf, std::size_t n, const SgdStep& s) {
  if (buf)
    HWY_DYNAMIC_DISPATCH(momentum_all)(p, g, buf, n, s);
  else
    HWY_DYNAMIC_DISPATCH(sgd_all)(p, g, n, s);
}

void sum_of_squares(const float* x, std::size_t blocks64, double* out) {
  HWY_DYNAMIC_DISPATCH(squares_all)(x, blocks64, out);
}

}  // namespace kernels
}  // namespace rz
#endif
