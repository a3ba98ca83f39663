// Rows of logits. Compiled once per target, like tensor/kernels/vector-inl.h.
#if defined(RZ_TENSOR_ROW_ACCESS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef RZ_TENSOR_ROW_ACCESS_INL_H_
#undef RZ_TENSOR_ROW_ACCESS_INL_H_
#else
#define RZ_TENSOR_ROW_ACCESS_INL_H_
#endif

#include <cmath>

#include "tensor/kernels/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace rz {
namespace HWY_NAMESPACE {

template <class T>
HWY_INLINE T* row_of(const Tensor& t, std::size_t row) {
  return elements<T>(t) + row * t.row_stride();
}

/// log Σ e^(factor · x); NaN if an element is NaN, or none is above -infinity.
template <class T>
HWY_INLINE double log_sum(const T* x, std::size_t n, float factor) {
  const float shift = largest(x, n);
  const double sum = sum_of_exponentials(x, n, [&](auto v) HWY_ATTR {
    return hn::Mul(hn::Sub(v, hn::Set(Floats(), shift)), hn::Set(Floats(), factor));
  });
  return static_cast<double>(factor) * static_cast<double>(shift) + std::log(sum);
}

}  // namespace HWY_NAMESPACE
}  // namespace rz
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
