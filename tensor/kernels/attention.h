#pragma once
/// What the attention kernels of every CPU path share: one head of one sequence, and small products of tiles.

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "tensor/kernels/dropout_params.h"

namespace rz::kernels {

constexpr std::size_t tile = 64;  ///< queries, keys, or channels at a time
using Tile = float[tile * tile];

/// Rows of `tokens` tokens, `stride` apart in qkv and `channels` apart in out; `size` channels are the
/// head's.
struct Head {
  std::size_t tokens, size, channels, stride;
  float scale;
  const float *q, *k, *v;
  float* log_sum;
  DropoutParams dropout;
  std::uint64_t decisions;  ///< number of the first decision on this head's probabilities

  /// Number of the decision on query i and key j.
  std::uint64_t decision(std::size_t i, std::size_t j) const { return decisions + i * tokens + j; }

  /// Tokens of the tile that begins at i.
  std::size_t span(std::size_t i) const { return std::min(tile, tokens - i); }
  /// How many keys of the tile at j the query i may see.
  std::size_t visible(std::size_t i, std::size_t j) const { return std::min(span(j), i - j + 1); }
  /// Channels of the part that begins at d.
  std::size_t width(std::size_t d) const { return std::min(tile, size - d); }
};

struct HeadGradient {
  const float *out, *d_out;
  float *d_q, *d_k, *d_v;
};

/// What need not be computed on a diagonal tile: a(i, k) is 0 for k > i (lower), for k < i (upper), or
/// c(i, j) is not wanted for j > i (lower_result).
enum class Part { whole, lower, upper, lower_result };

/// c = scale · a · b, or added to c. a(i, k) stands at a[i · a_row + k · a_step]; b is packed: row k at
/// b[k · tile], zeros after its columns.
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
