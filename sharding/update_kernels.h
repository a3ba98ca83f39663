#pragma once
/// The inner loops of the update rules and of the gradient norm. Vector code is chosen at run time; every
/// path gives the same bits, and so does any cut of the elements.

#include <cstddef>

namespace rz::kernels {

/// m may be null: no momentum. See SgdOptions.
struct SgdFactors {
  float rate, momentum, decay, grad_scale;
  bool nesterov;
};
void sgd(float* p, const float* g, float* m, std::size_t count, const SgdFactors&);

/// p = p · keep - rate · m / (sqrt(v) · inverse_correction2 + epsilon), with the moments of g · grad_scale +
/// l2 · p.
struct AdamFactors {
  float rate, inverse_correction2;   ///< learning rate / (1 - beta1^t); 1 / sqrt(1 - beta2^t)
  float beta1, rest1, beta2, rest2;  ///< rest = 1 - beta
  float epsilon, keep, l2, grad_scale;
};
void adam(float* p, const float* g, float* m, float* v, std::size_t count, const AdamFactors&);

/// out[b] = the squares of x[64 b … 64 b + 63], summed in double in a fixed order.
void sums_of_squares(const float* x, std::size_t blocks, double* out);

}  // namespace rz::kernels
