#pragma once
/// Column sums of a matrix, in double. Threads split the columns, so the result does not depend on their
/// number.

#include <algorithm>
#include <array>
#include <cstddef>

#include "comm/device/stream.h"
#include "tensor/ops.h"

namespace rz::ops {

/// Writes the sums of all columns to `out`. add(row, first, count, sums) adds columns [first, first + count)
/// of a row to sums[0 … count-1].
template <class F>
void column_sums(float* out, std::size_t rows, std::size_t columns, Into into, const Stream& stream,
                 const F& add) {
  constexpr std::size_t tile = 64;
  stream.parallel_for(columns, 32, [&](std::size_t begin, std::size_t end) {
    for (std::size_t first = begin; first < end; first += tile) {
      const std::size_t count = std::min(tile, end - first);
      std::array<double, tile> sums{};
      for (std::size_t row = 0; row < rows; ++row) add(row, first, count, sums.data());
      for (std::size_t j = 0; j < count; ++j)
        out[first + j] = static_cast<float>(into == Into::accumulate ? out[first + j] + sums[j] : sums[j]);
    }
  });
}

}  // namespace rz::ops
