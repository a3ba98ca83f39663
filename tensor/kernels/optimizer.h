#pragma once
/// Element-wise optimizer updates and sums of squares on raw memory; single-threaded. Each element is
/// computed independently, with one rounding per operation (no fused multiply-add), so that any split of a
/// span and any CPU give the same bits. State (m, v, buf) that would be subnormal is flushed to 0: decay
/// cannot shrink it further, and it would slow down every later update.

#include <cstddef>

#include "tensor/kernels/optimizer_step.h"

namespace rz::kernels {

/// AdamW: p *= 1 - lr·wd; m = b1·m + (1-b1)·g; v = b2·v + (1-b2)·g²; p -= lr/bc1 · m / (√v/√bc2 + eps).
void adamw(float* p, const float* g, float* m, float* v, std::size_t n, const AdamStep&);
/// Adam: the same with g += wd·p in place of the decay of p.
void adam(float* p, const float* g, float* m, float* v, std::size_t n, const AdamStep&);

/// SGD: g += wd·p; buf = momentum·buf + g; p -= lr·buf, or with nesterov p -= lr·(g + momentum·buf). buf may
/// be null if momentum is 0.
void sgd_momentum(float* p, const float* g, float* buf, std::size_t n, const SgdStep&);

/// out[i] = sum of squares of x[64i … 64i+63], in double, in an order that is the same on every CPU.
void sum_of_squares(const float* x, std::size_t blocks64, double* out);

}  // namespace rz::kernels
