#pragma once
/// Element-wise optimizer updates and the exact-order sum of squares, on raw memory, one thread. Every
/// element is computed alone with one rounding an operation (no fused multiply-add), so that a span may be
/// split anywhere and every CPU gives the same bits. State (m, v, buf) that would be subnormal becomes 0: it
/// would stay subnormal for ever, since it is too small to decay, and slow every later update.

#include <cstddef>

namespace rz::kernels {

/// Adam (Kingma and Ba, arXiv:1412.6980) and AdamW (Loshchilov and Hutter, arXiv:1711.05101) as in
/// torch.optim.
struct AdamStep {
  double lr = 1e-3;
  double beta1 = 0.9, beta2 = 0.999;
  float eps = 1e-8f;
  float weight_decay = 0;
  double bias_correction1 = 1;       ///< 1 - beta1^t
  double bias_correction2_sqrt = 1;  ///< √(1 - beta2^t)
  float grad_scale = 1;              ///< g is first multiplied by it
};
/// p *= 1 - lr·wd; m = b1·m + (1-b1)·g; v = b2·v + (1-b2)·g²; p -= lr/bc1 · m / (√v/√bc2 + eps).
void adamw(float* p, const float* g, float* m, float* v, std::size_t n, const AdamStep&);
/// The same with g += wd·p in place of the decay of p.
void adam(float* p, const float* g, float* m, float* v, std::size_t n, const AdamStep&);

struct SgdStep {
  float lr = 1e-3f;
  float momentum = 0;
  float weight_decay = 0;
  bool nesterov = false;
  bool first = false;  ///< the first step of this parameter: buf = g
  float grad_scale = 1;
};
/// g += wd·p; buf = momentum·buf + g; p -= lr·buf, or with nesterov p -= lr·(g + momentum·buf). buf may be
/// null if momentum is 0.
void sgd_momentum(float* p, const float* g, float* buf, std::size_t n, const SgdStep&);

/// out[i] = sum of squares, in double, of x[64i … 64i+63], in one order of additions whatever the CPU.
void sum_of_squares(const float* x, std::size_t blocks64, double* out);

}  // namespace rz::kernels
