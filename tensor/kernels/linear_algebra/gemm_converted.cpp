// Blocks of the factors are converted to f32, as they are stored, for the BLAS. Ranges of threads begin at
// multiples of the blocks, so that every element is computed by the same call of the BLAS for any number of
// threads.

#include "tensor/kernels/linear_algebra/gemm_16bit.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tensor/kernels/linear_algebra/gemm_converted.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "tensor/kernels/linear_algebra/gemm.h"
#include "tensor/kernels/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace rz {
namespace HWY_NAMESPACE {

template <class T>
HWY_INLINE void widen_as(float* to, const std::uint16_t* from, std::size_t stride, std::size_t rows,
                         std::size_t n) {
  for (std::size_t i = 0; i < rows; ++i)
    map(
        to + i * n, n, [](auto x) HWY_ATTR { return x; }, reinterpret_cast<const T*>(from) + i * stride);
}

void widen_bf16(float* to, const std::uint16_t* from, std::size_t stride, std::size_t rows, std::size_t n) {
  widen_as<bf16>(to, from, stride, rows, n);
}
void widen_f16(float* to, const std::uint16_t* from, std::size_t stride, std::size_t rows, std::size_t n) {
  widen_as<f16>(to, from, stride, rows, n);
}

}  // namespace HWY_NAMESPACE
}  // namespace rz
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace rz {

HWY_EXPORT(widen_bf16);
HWY_EXPORT(widen_f16);

namespace kernels {

namespace {

template <DType factors>
void widen(float* to, const std::uint16_t* from, std::size_t stride, std::size_t rows, std::size_t n) {
  if constexpr (factors == DType::bf16)
    HWY_DYNAMIC_DISPATCH(widen_bf16)(to, from, stride, rows, n);
  else
    HWY_DYNAMIC_DISPATCH(widen_f16)(to, from, stride, rows, n);
}

/// Converts elements (row … row+rows-1, column … column+columns-1) of a matrix, as it is stored.
template <DType factors>
void pack(void* to, const Matrix16& m, std::size_t row, std::size_t rows, std::size_t column,
          std::size_t columns) {
  auto* const values = static_cast<float*>(to);
  if (m.transposed)
    widen<factors>(values, m.data + column * m.stride + row, m.stride, columns, rows);
  else
    widen<factors>(values, m.data + row * m.stride + column, m.stride, rows, columns);
}

void multiply(const Product16& p, float* sums, std::size_t stride, const void* a, const void* b,
              std::size_t rows, std::size_t columns, std::size_t depth, bool first) {
  const Matrix left{static_cast<const float*>(a), p.a.transposed ? rows : depth, p.a.transposed};
  const Matrix right{static_cast<const float*>(b), p.b.transposed ? depth : columns, p.b.transposed};
  gemm(sums, stride, rows, columns, depth, 1, left, right, first ? 0 : 1);
}

template <DType factors>
constexpr GemmEngine engine{"conversion to f32", 128, 512, pack<factors>, pack<factors>, multiply};

}  // namespace

const GemmEngine& converting_engine(DType factors) {
  return factors == DType::bf16 ? engine<DType::bf16> : engine<DType::f16>;
}

}  // namespace kernels
}  // namespace rz
#endif
