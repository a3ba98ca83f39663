#pragma once
/// Element-wise optimizer updates and the exact-order sum of squares, on raw memory, one thread. Every
/// element is computed alone with one rounding an operation (no fused multiply-add), so that a span may be
/// split anywhere and every CPU gives the same bits. State (m, v, buf) that would be subnormal becomes 0: it
/// would stay subnormal for ever, since it is too small to decay, and slow every later update.

#include <cstddef>

#include "tensor/kernels/optimizer_step.h"

namespace rz::kernels {

/// p *= 1 - lr·wd; m = b1·m + (1-b1)·g; v = b2·v + (1-b2)·g²; p -= lr/bc1 · m / (√v/√bc2 + eps).
void adamw(float* p, const float* g, float* m, float* v, std::size_t n, const AdamStep&);
/// The same with g += wd·p in place of the decay of p.
void adam(float* p, const float* g, float* m, float* v, std::size_t n, const AdamStep&);

/// g += wd·p; buf = momentum·buf + g; p -= lr·buf, or with nesterov p -= lr·(g + momentum·buf). buf may be
/// null if momentum is 0.
void sgd_momentum(float* p, const float* g, float* buf, std::size_t n, const SgdStep&);

/// out[i] = sum of squares, in double, of x[64i … 64i+63], in one order of additions whatever the CPU.
void sum_of_squares(const float* x, std::size_t blocks64, double* out);

}  // namespace rz::kernels
