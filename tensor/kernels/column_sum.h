#pragma once
/// Column sums of a matrix, in double. Threads split the columns, so the result does not depend on their
/// number.

#include <algorithm>
#include <array>
#include <cstddef>

#include "comm/core/math.h"
#include "comm/device/stream.h"
#include "tensor/kernels/dtype_dispatch.h"
#include "tensor/ops.h"

namespace rz::ops {

/// Writes the sums of all columns of a matrix to `out`, one element per column, of f32, f16 or bf16. add(row,
/// first, count, sums) adds columns [first, first + count) of a row to sums[0 … count-1].
template <class F>
void column_sums(const Tensor& out, std::size_t rows, Into into, const Stream& stream, const F& add) {
  constexpr std::size_t tile = 64;
  dispatch_dtype(out.dtype(), [&](auto t) {
    using T = decltype(t);
    T* const total = out.data<T>();
    stream.parallel_for(out.count(), 32, [&](std::size_t begin, std::size_t end) {
      for (std::size_t first = begin; first < end; first += tile) {
        const std::size_t count = std::min(tile, end - first);
        std::array<double, tile> sums{};
        for (std::size_t row = 0; row < rows; ++row) add(row, first, count, sums.data());
        for (std::size_t j = 0; j < count; ++j) {
          T& to = total[first + j];
          to = from_f32<T>(static_cast<float>(into == Into::accumulate ? to_f32(to) + sums[j] : sums[j]));
        }
      }
    });
  });
}

/// The column sums of a matrix of f32, f16 or bf16 with out.count() columns.
void column_sums_of(const Tensor& out, const Tensor& matrix, Into, const Stream&);

}  // namespace rz::ops
