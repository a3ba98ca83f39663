#include "tensor/kernels/column_sum.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tensor/kernels/column_sum.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "tensor/kernels/check.h"
#include "tensor/kernels/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace rz {
namespace HWY_NAMESPACE {

/// Elements [at, at + count) of the matrix.
void add_row(const Tensor& matrix, std::size_t at, std::size_t count, double* HWY_RESTRICT sums) {
  ops::dispatch_dtype(matrix.dtype(), [&](auto t) HWY_ATTR {
    const auto* const row = elements<decltype(t)>(matrix) + at;
    add_to_sums(
        sums, count, [](auto x) HWY_ATTR { return x; }, row);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace rz
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace rz {

HWY_EXPORT(add_row);

namespace ops {

void column_sums_of(const Tensor& out, const Tensor& matrix, Into into, const Stream& stream) {
  const std::size_t stride = matrix.row_stride();
  column_sums(out, rows(matrix), into, stream,
              [&](std::size_t row, std::size_t first, std::size_t count, double* sums) {
                HWY_DYNAMIC_DISPATCH(add_row)(matrix, row * stride + first, count, sums);
              });
}

}  // namespace ops
}  // namespace rz
#endif
