#pragma once
/// Definitions shared by the attention kernels of all CPU targets: one head of one sequence, and products of
/// small tiles.

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "tensor/kernels/elementwise/dropout_params.h"

namespace rz::kernels {

constexpr std::size_t tile = 64;  ///< queries, keys or channels per tile
using Tile = float[tile * tile];

/// One head of one sequence: `tokens` rows of `size` channels. Rows are `stride` elements apart in qkv and
/// `channels` apart in out.
template <class T>
struct HeadOf {
  std::size_t tokens, size, channels, stride;
  float scale;
  const T *q, *k, *v;
  float* log_sum;
  DropoutParams dropout;
  std::uint64_t decisions;  ///< index of the first dropout decision on this head's probabilities

  /// Index of the dropout decision on query i and key j.
  std::uint64_t decision(std::size_t i, std::size_t j) const { return decisions + i * tokens + j; }

  /// Tokens in the tile that begins at token i.
  std::size_t span(std::size_t i) const { return std::min(tile, tokens - i); }
  /// Number of keys in the tile at j that query i attends to.
  std::size_t visible(std::size_t i, std::size_t j) const { return std::min(span(j), i - j + 1); }
  /// Channels in the tile that begins at channel d.
  std::size_t width(std::size_t d) const { return std::min(tile, size - d); }
};
using Head = HeadOf<float>;

template <class T>
struct HeadGradientOf {
  const T *out, *d_out;
  T *d_q, *d_k, *d_v;
};
using HeadGradient = HeadGradientOf<float>;

/// Structure of a product on a diagonal tile: a(i, k) is 0 for k > i (lower) or for k < i (upper), or c(i, j)
/// is not needed for j > i (lower_result).
enum class Part { whole, lower, upper, lower_result };

/// c = scale · a · b, or c += scale · a · b if `add`. a(i, k) is a[i · a_row + k · a_step]. b is packed: row
/// k starts at b[k · tile] and is zero-padded.
struct TileProduct {
  float* c;
  std::size_t c_stride;
  const float* a;
  std::size_t a_row, a_step;
  const float* b;
  std::size_t rows, columns, steps;
  float scale;
  bool add;
  Part part;
};

}  // namespace rz::kernels
