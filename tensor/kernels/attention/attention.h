#pragma once
/// Definitions shared by the attention kernels of all CPU targets: heads of one sequence, and products of
/// small tiles.

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "comm/core/types.h"
#include "tensor/kernels/attention/visible_keys.h"
#include "tensor/kernels/elementwise/dropout_params.h"

namespace rz::kernels {

constexpr std::size_t tile = 64;  ///< queries, keys or channels per tile
using Tile = float[tile * tile];
constexpr std::size_t query_block = 8 * tile;  ///< queries for which a tile of keys is packed once

/// Floats of a tile's rows of `size` channels, packed.
constexpr std::size_t packed_tile(std::size_t size) { return (size + tile - 1) / tile * tile * tile; }
/// Floats of all packed rows: forward keys and values; backward keys, both transposed, and two of each query.
constexpr std::size_t packed_floats(std::size_t size) { return 2 * packed_tile(size); }
constexpr std::size_t packed_gradient_floats(std::size_t size) {
  return (3 + 2 * query_block / tile) * packed_tile(size);
}

/// `heads` query heads of one sequence that attend to one key head, of `size` channels each. Rows are the
/// strides apart; query heads lie side by side in q and out.
template <class T>
struct HeadsOf {
  std::size_t heads, queries, size;
  std::size_t q_stride, k_stride, v_stride, out_stride;
  float scale;
  const T *q, *k, *v;
  float* log_sum;
  VisibleKeys visible;
  DropoutParams dropout;
  std::uint64_t decisions;        ///< index of the first dropout decision on these heads' probabilities
  std::size_t decisions_per_row;  ///< keys, with padding

  /// The head `h` alone.
  HeadsOf head(std::size_t h) const {
    HeadsOf one = *this;
    one.heads = 1, one.q += h * size, one.log_sum += h * queries;
    one.decisions += h * queries * decisions_per_row;
    return one;
  }
  /// Index of the dropout decision on query i and key j of the first head.
  std::uint64_t decision(std::size_t i, std::size_t j) const { return decisions + i * decisions_per_row + j; }

  /// Queries in the tile that begins at query i.
  std::size_t span(std::size_t i) const { return std::min(tile, queries - i); }
  /// Keys in the tile that begins at key j.
  std::size_t key_span(std::size_t j) const { return std::min(tile, visible.keys - j); }
  /// Channels in the tile that begins at channel d.
  std::size_t width(std::size_t d) const { return std::min(tile, size - d); }

  struct Range {
    std::size_t begin, end;
    bool empty() const { return begin >= end; }
  };
  /// Keys of the tiles that a query of the tile at i attends to: from the beginning of a tile.
  Range keys_of_tile(std::size_t i) const { return keys_of_tiles(i, i + span(i)); }
  /// The same for the tiles of queries [begin, end).
  Range keys_of_tiles(std::size_t begin, std::size_t end) const {
    return {visible.begin(begin) / tile * tile, visible.end(end - 1)};
  }
  /// Keys of the tile at j that query i attends to, as indices in the tile.
  Range keys_in_tile(std::size_t i, std::size_t j) const {
    const std::size_t begin = std::max(visible.begin(i), j), end = std::min(visible.end(i), j + key_span(j));
    return begin < end ? Range{begin - j, end - j} : Range{0, 0};
  }
  /// Whether query r of the tile at i attends to no key after key r of the tile at j.
  bool on_diagonal(std::size_t i, std::size_t j) const { return visible.causal && visible.past + i == j; }
};
using Heads = HeadsOf<float>;

/// Floats between rows of the memory of attend_few(): whole vectors of every target.
constexpr std::size_t few_width(std::size_t size) { return (size + 63) / 64 * 64; }
/// Attention of few queries; `memory` has heads · queries · (2 · few_width(size) + keys) floats.
void attend_few(const HeadsOf<float>&, float* out, float* memory);
void attend_few(const HeadsOf<bf16>&, bf16* out, float* memory);
void attend_few(const HeadsOf<f16>&, f16* out, float* memory);

template <class T>
struct HeadsGradientOf {
  const T *out, *d_out;
  T *d_q, *d_k, *d_v;
  std::size_t d_q_stride, d_k_stride, d_v_stride;
  std::size_t keys;  ///< rows of d_k and d_v, all of which are stored

  HeadsGradientOf head(std::size_t h, std::size_t size) const {
    HeadsGradientOf one = *this;
    one.out += h * size, one.d_out += h * size, one.d_q += h * size;
    return one;
  }
};
using HeadsGradient = HeadsGradientOf<float>;

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
