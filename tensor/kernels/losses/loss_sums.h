#pragma once
/// The arithmetic of losses as {sum, number of terms}, for both compilers.

#include "comm/core/math.h"

namespace rz::ops::losses {

RZ_HOST_DEVICE inline void add_losses(float* loss, double* sums, float* ratio, const double* a,
                                      const double* b) {
  const double r = b[1] > 0 ? a[1] / b[1] : 0;
  sums[0] = a[0] + (r > 0 ? r * b[0] : 0), sums[1] = a[1];
  *loss = static_cast<float>(sums[0]), *ratio = static_cast<float>(r);
}

RZ_HOST_DEVICE inline void add_scalar(float* loss, double* sums, float* terms, const double* a,
                                      const float* b) {
  sums[0] = a[0] + (a[1] > 0 ? a[1] * static_cast<double>(*b) : 0), sums[1] = a[1];
  *loss = static_cast<float>(sums[0]), *terms = static_cast<float>(a[1]);
}

RZ_HOST_DEVICE inline void scale_loss(float* loss, double* sums, const double* a, double factor) {
  sums[0] = factor * a[0], sums[1] = a[1];
  *loss = static_cast<float>(sums[0]);
}

}  // namespace rz::ops::losses
