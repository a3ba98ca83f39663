// Rows of scores, and rows of another dtype. Compiled once per target, like tensor/kernels/vector-inl.h.
#if defined(RZ_TENSOR_SCORES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef RZ_TENSOR_SCORES_INL_H_
#undef RZ_TENSOR_SCORES_INL_H_
#else
#define RZ_TENSOR_SCORES_INL_H_
#endif

#include <limits>

#include "tensor/kernels/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace rz {
namespace HWY_NAMESPACE {

constexpr float no_score = -std::numeric_limits<float>::infinity();

/// scores[0 … n) = e^(score - shift), of scores that exceed the shift by rounding only. Returns the sum.
inline float exponentials(float* scores, std::size_t n, float shift) {
  const Floats d;
  const std::size_t lanes = hn::Lanes(d);
  const auto offset = hn::Set(d, shift);
  FloatVector total = hn::Zero(d);
  std::size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto e = exponential_of_difference(hn::Sub(hn::LoadU(d, scores + i), offset));
    hn::StoreU(e, d, scores + i);
    total = hn::Add(total, e);
  }
  if (i < n) {
    const float lowest = -std::numeric_limits<float>::infinity();
    const auto e = exponential_of_difference(hn::Sub(load_part(d, scores + i, n - i, lowest), offset));
    store_part(e, d, scores + i, n - i);
    total = hn::Add(total, e);
  }
  return hn::GetLane(hn::SumOfLanes(d, total));
}

inline void multiply_row(float* row, std::size_t n, float factor) {
  for (std::size_t i = 0; i < n; ++i) row[i] *= factor;
}

/// `rows` rows of n elements; strides are in elements between rows.
template <class To, class From>
void convert_rows(To* to, std::size_t to_stride, const From* from, std::size_t from_stride, std::size_t rows,
                  std::size_t n) {
  for (std::size_t i = 0; i < rows; ++i)
    map(
        to + i * to_stride, n, [](auto x) HWY_ATTR { return x; }, from + i * from_stride);
}

}  // namespace HWY_NAMESPACE
}  // namespace rz
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
