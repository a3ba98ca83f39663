// Attention on the CPU, per (batch, head), in tiles of 64 queries and 64 keys; tiles that are hidden from all
// their queries are skipped. Forward keeps a running maximum and sum per query (Milakov and Gimelshein,
// arXiv:1805.02867; Dao et al., arXiv:2205.14135), so that scores need one tile on the stack for any T.
// Backward recomputes the probabilities from log_sum. The tiles are too small for a BLAS to be fast, and a
// BLAS cannot skip half of a diagonal tile, so the products are implemented here, with the second operand
// packed into tiles, once for a block of tiles of queries. Heads of 16-bit tensors are converted to f32
// first, and their results are rounded once, at the end. Backward adds the query heads of one key head in
// order, by one thread.
//
// A few queries of a long cache take another path, attention_few.cpp.

#include "tensor/attention_ops.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tensor/kernels/attention/attention.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "comm/core/integer_math.h"
#include "comm/device/meta.h"
#include "tensor/kernels/attention/attention.h"
#include "tensor/kernels/attention/scores-inl.h"
#include "tensor/kernels/check.h"
#include "tensor/kernels/device_ops.h"
#include "tensor/kernels/elementwise/dropout-inl.h"
#include "tensor/kernels/transpose-inl.h"
#include "tensor/kernels/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace rz {
namespace HWY_NAMESPACE {

using kernels::Heads;
using kernels::HeadsGradient;
using kernels::HeadsGradientOf;
using kernels::HeadsOf;
using kernels::Part;
using kernels::query_block;
using kernels::tile;
using kernels::Tile;
using kernels::TileProduct;

// ---- products of tiles

void pack(float* to, const float* from, std::size_t stride, std::size_t rows, std::size_t columns) {
  for (std::size_t i = 0; i < rows; ++i) {
    std::memcpy(to + i * tile, from + i * stride, columns * sizeof(float));
    std::memset(to + i * tile + columns, 0, (tile - columns) * sizeof(float));
  }
}

/// Packs the transpose: rows of `to` are columns of `from`.
void pack_transposed(float* to, const float* from, std::size_t stride, std::size_t rows,
                     std::size_t columns) {
  constexpr std::size_t line = 64 / sizeof(float);
  const std::size_t whole_rows = rows / line * line, whole_columns = columns / line * line;
  for (std::size_t i = 0; i < whole_rows; i += line)
    for (std::size_t j = 0; j < whole_columns; j += line)
      transpose_lines(to + j * tile + i, tile, from + i * stride + j, stride);
  for (std::size_t j = 0; j < columns; ++j) {
    for (std::size_t i = j < whole_columns ? whole_rows : 0; i < rows; ++i)
      to[j * tile + i] = from[i * stride + j];
    std::memset(to + j * tile + rows, 0, (tile - rows) * sizeof(float));
  }
}

template <int rows, int vectors, class F>
HWY_INLINE void each_sum(const F& f) {
#pragma GCC unroll 6
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < vectors; ++v) f(r, v);
}

/// A block of `rows` rows from i and `vectors` vectors of columns from j, summed in registers: up to 6 x 2.
template <int rows, int vectors>
HWY_INLINE void multiply_block(const TileProduct& p, std::size_t i, std::size_t j, std::size_t first,
                               std::size_t past) {
  const Floats d;
  const std::size_t lanes = hn::Lanes(d);
  FloatVector sum[6][2];
  each_sum<rows, vectors>([&](int r, int v) HWY_ATTR { sum[r][v] = hn::Zero(d); });
  const float* a = p.a + i * p.a_row;
  for (std::size_t k = first; k < past; ++k) {
    const float* b = p.b + k * tile + j;
    const FloatVector left = hn::LoadU(d, b), right = vectors > 1 ? hn::LoadU(d, b + lanes) : left;
    each_sum<rows, 1>([&](int r, int) HWY_ATTR {
      const FloatVector factor = hn::Set(d, a[static_cast<std::size_t>(r) * p.a_row + k * p.a_step]);
      sum[r][0] = hn::MulAdd(factor, left, sum[r][0]);
      if (vectors > 1) sum[r][1] = hn::MulAdd(factor, right, sum[r][1]);
    });
  }
  float* const c = p.c + i * p.c_stride + j;
  const FloatVector scale = hn::Set(d, p.scale);
  const std::size_t left = p.columns - j;
  const auto at = [&](int r, int v) {
    return c + static_cast<std::size_t>(r) * p.c_stride + static_cast<std::size_t>(v) * lanes;
  };
  if (left < vectors * lanes)
    each_sum<rows, vectors>([&](int r, int v) HWY_ATTR {
      const std::size_t n = std::min(lanes, left - static_cast<std::size_t>(v) * lanes);
      const FloatVector before = load_part(d, at(r, v), p.add ? n : 0, 0);
      store_part(p.add ? hn::MulAdd(sum[r][v], scale, before) : hn::Mul(sum[r][v], scale), d, at(r, v), n);
    });
  else if (p.add)
    each_sum<rows, vectors>([&](int r, int v) HWY_ATTR {
      hn::StoreU(hn::MulAdd(sum[r][v], scale, hn::LoadU(d, at(r, v))), d, at(r, v));
    });
  else
    each_sum<rows, vectors>([&](int r, int v)
                                HWY_ATTR { hn::StoreU(hn::Mul(sum[r][v], scale), d, at(r, v)); });
}

template <int rows>
HWY_INLINE void multiply_rows(const TileProduct& p, std::size_t i) {
  const std::size_t lanes = hn::Lanes(Floats());
  const std::size_t first = p.part == Part::upper ? i : 0;
  const std::size_t past = p.part == Part::lower ? std::min(p.steps, i + rows) : p.steps;
  const std::size_t end = p.part == Part::lower_result ? std::min(p.columns, i + rows) : p.columns;
  for (std::size_t j = 0; j < end; j += 2 * lanes)
    if (p.columns - j > lanes)
      multiply_block<rows, 2>(p, i, j, first, past);
    else
      multiply_block<rows, 1>(p, i, j, first, past);
}

void multiply(const TileProduct& p) {
  std::size_t i = 0;
  for (; i + 6 <= p.rows; i += 6) multiply_rows<6>(p, i);
  if (i + 4 <= p.rows) multiply_rows<4>(p, i), i += 4;
  for (; i < p.rows; ++i) multiply_rows<1>(p, i);
}

// ---- rows of scores

/// Sets the row of a tile to 0 outside of the range.
void clear_outside(float* row, Heads::Range range) {
  std::memset(row, 0, range.begin * sizeof(float));
  std::memset(row + range.end, 0, (tile - range.end) * sizeof(float));
}

void clear_rows(float* rows, std::size_t stride, std::size_t begin, std::size_t end, std::size_t n) {
  for (std::size_t i = begin; i < end; ++i) std::memset(rows + i * stride, 0, n * sizeof(float));
}

/// Computes d_scores = p · (d_p - delta) · scale in place of d_p.
void score_gradient(float* HWY_RESTRICT d_p, const float* HWY_RESTRICT p, std::size_t n, float delta,
                    float scale) {
  for (std::size_t i = 0; i < n; ++i) d_p[i] = p[i] * (d_p[i] - delta) * scale;
}

// ---- heads

/// Applies dropout to probabilities or their gradients: n of query i, keys from j.
void drop_row(const Heads& h, float* row, std::size_t n, std::size_t i, std::size_t j) {
  if (h.dropout.active()) drop(row, row, n, h.decision(i, j), h.dropout);
}

// Packed rows of `size` channels are tiles, one for each 64 channels.

void pack_rows(float* to, const Heads& h, const float* from, std::size_t stride, std::size_t rows) {
  for (std::size_t d = 0; d < h.size; d += tile) pack(to + d * tile, from + d, stride, rows, h.width(d));
}
void pack_rows_transposed(float* to, const Heads& h, const float* from, std::size_t stride,
                          std::size_t rows) {
  for (std::size_t d = 0; d < h.size; d += tile)
    pack_transposed(to + d * tile, from + d, stride, rows, h.width(d));
}

/// c = scale · a · bᵀ over `size` channels, for the queries of the tile at i and the keys of the tile at j,
/// whose rows b are packed and transposed.
void multiply_transposed(Tile& c, const Heads& h, std::size_t i, std::size_t j, const float* a,
                         std::size_t a_stride, const float* b, float scale) {
  for (std::size_t d = 0; d < h.size; d += tile)
    multiply({c, tile, a + i * a_stride + d, a_stride, 1, b + d * tile, h.span(i), tile, h.width(d), scale,
              d > 0, h.on_diagonal(i, j) ? Part::lower_result : Part::whole});
}

/// Rows of c (`c_stride` apart) = weights · packed rows b, for the queries of the tile at i and the keys of
/// the tile at j.
void mix_keys(const Heads& h, float* c, std::size_t c_stride, const Tile& weights, const float* b,
              std::size_t i, std::size_t j, bool add) {
  for (std::size_t d = 0; d < h.size; d += tile)
    multiply({c + i * c_stride + d, c_stride, weights, tile, 1, b + d * tile, h.span(i), h.width(d),
              h.key_span(j), 1, add, h.on_diagonal(i, j) ? Part::lower : Part::whole});
}

/// The same with transposed weights: rows of c belong to keys, those of b to queries.
void mix_queries(const Heads& h, float* c, std::size_t c_stride, const Tile& weights, const float* b,
                 std::size_t i, std::size_t j, bool add) {
  for (std::size_t d = 0; d < h.size; d += tile)
    multiply({c + j * c_stride + d, c_stride, weights, 1, tile, b + d * tile, h.key_span(j), h.width(d),
              h.span(i), 1, add, h.on_diagonal(i, j) ? Part::upper : Part::whole});
}

/// What forward keeps of each query of a block.
struct RunningSums {
  float max[query_block], total[query_block];
};

/// Adds the keys of the tile at j to the queries of the tile at i, whose sums are from row `at` on.
void attend_tile(const Heads& h, float* out, RunningSums& sums, std::size_t at, std::size_t i, std::size_t j,
                 bool first, const float* k, const float* v) {
  alignas(64) Tile scores;
  multiply_transposed(scores, h, i, j, h.q, h.q_stride, k, h.scale);
  for (std::size_t r = 0; r < h.span(i); ++r) {
    const Heads::Range seen = h.keys_in_tile(i + r, j);
    clear_outside(scores + r * tile, seen);
    if (seen.empty()) continue;
    float* row = scores + r * tile + seen.begin;
    float &row_max = sums.max[at + r], &total = sums.total[at + r];
    const std::size_t n = seen.end - seen.begin;
    const float before = row_max;
    row_max = std::max(before, largest(row, n));
    const float sum = exponentials(row, n, row_max);
    const float keep = first ? 0 : std::exp(before - row_max);
    total = total * keep + sum;
    drop_row(h, row, n, i + r, j + seen.begin);
    if (!first && keep != 1) multiply_row(out + (i + r) * h.out_stride, h.size, keep);
  }
  mix_keys(h, out, h.out_stride, scores, v, i, j, !first);
}

/// The queries of a block, from `begin` on: keys and values are packed once for all of its tiles.
void attend_block(const Heads& h, float* out, std::size_t begin, float* memory) {
  RunningSums sums;
  std::fill_n(sums.max, query_block, no_score);
  std::fill_n(sums.total, query_block, 0.0f);
  const std::size_t end = std::min(h.queries, begin + query_block);
  float *const k = memory, *const v = k + kernels::packed_tile(h.size);
  const Heads::Range all = h.keys_of_tiles(begin, end);
  for (std::size_t j = all.begin; j < all.end; j += tile) {
    pack_rows_transposed(k, h, h.k + j * h.k_stride, h.k_stride, h.key_span(j));
    pack_rows(v, h, h.v + j * h.v_stride, h.v_stride, h.key_span(j));
    for (std::size_t i = begin; i < end; i += tile) {
      const Heads::Range keys = h.keys_of_tile(i);
      if (keys.begin <= j && j < keys.end) attend_tile(h, out, sums, i - begin, i, j, j == keys.begin, k, v);
    }
  }
  for (std::size_t i = begin; i < end; ++i) {
    const float total = sums.total[i - begin];
    float* row = out + i * h.out_stride;
    h.log_sum[i] = static_cast<float>(sums.max[i - begin] + std::log(static_cast<double>(total)));
    if (total == 0)
      std::memset(row, 0, h.size * sizeof(float));
    else
      multiply_row(row, h.size, 1 / total);
  }
}

/// Packed rows: of the tile of queries at hand, and of the tile of keys.
struct PackedRows {
  const float *q, *d_out, *k, *k_transposed, *v_transposed;
};

/// The gradients of the queries of the tile at i, of which `first` is the first tile of keys, and of the keys
/// of the tile at j: the latter are added to d_k and d_v if `add`.
void attend_tile_backward(const Heads& h, const HeadsGradient& g, const PackedRows& packed,
                          const float* delta, std::size_t i, std::size_t j, bool first, bool add) {
  alignas(64) Tile p;
  alignas(64) Tile d_p;
  multiply_transposed(p, h, i, j, h.q, h.q_stride, packed.k_transposed, h.scale);
  multiply_transposed(d_p, h, i, j, g.d_out, h.out_stride, packed.v_transposed, 1);
  for (std::size_t r = 0; r < h.span(i); ++r) {
    const Heads::Range seen = h.keys_in_tile(i + r, j);
    clear_outside(p + r * tile, seen);
    clear_outside(d_p + r * tile, seen);
    if (seen.empty()) continue;
    float *const p_row = p + r * tile + seen.begin, *const d_row = d_p + r * tile + seen.begin;
    const std::size_t n = seen.end - seen.begin, key = j + seen.begin;
    exponentials(p_row, n, h.log_sum[i + r]);
    drop_row(h, d_row, n, i + r, key);
    score_gradient(d_row, p_row, n, delta[r], h.scale);
    drop_row(h, p_row, n, i + r, key);
  }
  mix_queries(h, g.d_v, g.d_v_stride, p, packed.d_out, i, j, add);
  mix_keys(h, g.d_q, g.d_q_stride, d_p, packed.k, i, j, !first);
  mix_queries(h, g.d_k, g.d_k_stride, d_p, packed.q, i, j, add);
}

/// The queries of a block, from `begin` on. d_k and d_v of the first keys, `done` of them, have gradients
/// already, and those after them are stored. Returns the new number.
std::size_t attend_block_backward(const Heads& h, const HeadsGradient& g, std::size_t begin, std::size_t done,
                                  float* memory) {
  const auto clear_keys = [&](std::size_t from, std::size_t until) {
    clear_rows(g.d_k, g.d_k_stride, from, until, h.size);
    clear_rows(g.d_v, g.d_v_stride, from, until, h.size);
  };
  const std::size_t end = std::min(h.queries, begin + query_block), step = kernels::packed_tile(h.size);
  float *const k = memory, *const k_transposed = k + step, *const v_transposed = k_transposed + step;
  float *const q = v_transposed + step, *const d_out = q + query_block / tile * step;
  float delta[query_block];
  for (std::size_t i = begin; i < end; ++i) {
    const std::size_t at = i * h.out_stride;
    const auto product = [](auto x, auto y) HWY_ATTR { return hn::Mul(x, y); };
    delta[i - begin] = static_cast<float>(sum(h.size, product, g.d_out + at, g.out + at));
  }
  for (std::size_t i = begin, t = 0; i < end; i += tile, ++t) {
    if (h.keys_of_tile(i).empty()) clear_rows(g.d_q, g.d_q_stride, i, i + h.span(i), h.size);
    pack_rows(q + t * step, h, h.q + i * h.q_stride, h.q_stride, h.span(i));
    pack_rows(d_out + t * step, h, g.d_out + i * h.out_stride, h.out_stride, h.span(i));
  }
  const Heads::Range all = h.keys_of_tiles(begin, end);
  if (all.empty()) return done;
  clear_keys(done, all.begin);  // a window or a document may skip tiles
  for (std::size_t j = all.begin; j < all.end; j += tile) {
    const float* const keys = h.k + j * h.k_stride;
    pack_rows(k, h, keys, h.k_stride, h.key_span(j));
    pack_rows_transposed(k_transposed, h, keys, h.k_stride, h.key_span(j));
    pack_rows_transposed(v_transposed, h, h.v + j * h.v_stride, h.v_stride, h.key_span(j));
    bool add = j < done;
    for (std::size_t i = begin, t = 0; i < end; i += tile, ++t) {
      const Heads::Range seen = h.keys_of_tile(i);
      if (j < seen.begin || j >= seen.end) continue;
      const PackedRows packed{q + t * step, d_out + t * step, k, k_transposed, v_transposed};
      attend_tile_backward(h, g, packed, delta + (i - begin), i, j, j == seen.begin, add);
      add = true;
    }
    if (!add) clear_keys(j, j + h.key_span(j));
    done = std::max(done, j + h.key_span(j));
  }
  return done;
}

/// One head.
void attend(const Heads& h, float* out, float* memory) {
  for (std::size_t i = 0; i < h.queries; i += query_block) attend_block(h, out, i, memory);
}

/// One head. The first keys, `done` of them, have gradients already. Returns the new number.
std::size_t attend_backward_head(const Heads& h, const HeadsGradient& g, std::size_t done, float* memory) {
  for (std::size_t i = 0; i < h.queries; i += query_block)
    done = attend_block_backward(h, g, i, done, memory);
  clear_rows(g.d_k, g.d_k_stride, done, g.keys, h.size);
  clear_rows(g.d_v, g.d_v_stride, done, g.keys, h.size);
  return std::max(done, g.keys);
}

void attend_backward(const Heads& h, const HeadsGradient& g, float* memory) {
  std::size_t done = 0;
  for (std::size_t n = 0; n < h.heads; ++n)
    done = attend_backward_head(h.head(n), g.head(n, h.size), done, memory);
}

// ---- heads of 16-bit tensors

/// The heads in f32: keys and values in `memory`, 2 · keys · size elements, with rows of `size` elements; q
/// is to be converted for each head, into the memory after them, which has rows of `size` elements, as has
/// out.
template <class T>
Heads with_wide_keys(const HeadsOf<T>& h, float* memory) {
  const std::size_t count = h.visible.keys * h.size;
  convert_rows(memory, h.size, h.k, h.k_stride, h.visible.keys, h.size);
  convert_rows(memory + count, h.size, h.v, h.v_stride, h.visible.keys, h.size);
  return {1,           h.queries,          h.size, h.size,         h.size,    h.size,    h.size,
          h.scale,     memory + 2 * count, memory, memory + count, h.log_sum, h.visible, h.dropout,
          h.decisions, h.decisions_per_row};
}

template <class T>
void attend_as(const HeadsOf<T>& h, T* out, float* packed) {
  float* const memory = packed + kernels::packed_floats(h.size);
  const Heads wide = with_wide_keys(h, memory);
  float* const q = memory + 2 * h.visible.keys * h.size;
  float* const wide_out = q + h.queries * h.size;
  convert_rows(q, h.size, h.q, h.q_stride, h.queries, h.size);
  attend(wide, wide_out, packed);
  convert_rows(out, h.out_stride, wide_out, h.size, h.queries, h.size);
}

template <class T>
void attend_backward_as(const HeadsOf<T>& h, const HeadsGradientOf<T>& g, float* packed) {
  float* const memory = packed + kernels::packed_gradient_floats(h.size);
  const Heads keys = with_wide_keys(h, memory);
  const std::size_t count = h.queries * h.size, key_count = g.keys * h.size;
  float *const q = memory + 2 * h.visible.keys * h.size, *const out = q + count, *const d_out = out + count,
               *const d_q = d_out + count, *const d_k = d_q + count, *const d_v = d_k + key_count;
  std::size_t done = 0;
  for (std::size_t n = 0; n < h.heads; ++n) {
    const HeadsOf<T> narrow = h.head(n);
    const HeadsGradientOf<T> gradient = g.head(n, h.size);
    Heads wide = keys;
    wide.log_sum = narrow.log_sum, wide.decisions = narrow.decisions;
    convert_rows(q, h.size, narrow.q, h.q_stride, h.queries, h.size);
    convert_rows(out, h.size, gradient.out, h.out_stride, h.queries, h.size);
    convert_rows(d_out, h.size, gradient.d_out, h.out_stride, h.queries, h.size);
    done =
        attend_backward_head(wide, {out, d_out, d_q, d_k, d_v, h.size, h.size, h.size, g.keys}, done, packed);
    convert_rows(gradient.d_q, g.d_q_stride, d_q, h.size, h.queries, h.size);
  }
  convert_rows(g.d_k, g.d_k_stride, d_k, h.size, g.keys, h.size);
  convert_rows(g.d_v, g.d_v_stride, d_v, h.size, g.keys, h.size);
}

void attend_f32(const Heads& h, float* out, float* memory) { attend(h, out, memory); }
void attend_bf16(const HeadsOf<bf16>& h, bf16* out, float* memory) { attend_as(h, out, memory); }
void attend_f16(const HeadsOf<f16>& h, f16* out, float* memory) { attend_as(h, out, memory); }
void attend_backward_f32(const Heads& h, const HeadsGradient& g, float* memory) {
  attend_backward(h, g, memory);
}
void attend_backward_bf16(const HeadsOf<bf16>& h, const HeadsGradientOf<bf16>& g, float* memory) {
  attend_backward_as(h, g, memory);
}
void attend_backward_f16(const HeadsOf<f16>& h, const HeadsGradientOf<f16>& g, float* memory) {
  attend_backward_as(h, g, memory);
}

}  // namespace HWY_NAMESPACE
}  // namespace rz
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace rz {

HWY_EXPORT(attend_f32);
HWY_EXPORT(attend_bf16);
HWY_EXPORT(attend_f16);
HWY_EXPORT(attend_backward_f32);
HWY_EXPORT(attend_backward_bf16);
HWY_EXPORT(attend_backward_f16);

namespace ops {

namespace {

using kernels::HeadsGradientOf;
using kernels::HeadsOf;

/// Memory of the calling thread for `count` floats, from a cache line on.
float* thread_memory(std::size_t count) {
  constexpr std::size_t line = 64;
  static thread_local std::vector<float> memory;
  const std::size_t with_padding = count + line / sizeof(float);
  if (memory.size() < with_padding) memory.resize(with_padding);
  const auto at = reinterpret_cast<std::uintptr_t>(memory.data());
  return memory.data() + (round_up(at, line) - at) / sizeof(float);
}

/// The kernels of a dtype.
template <class T>
struct Kernels {
  void (*attend)(const HeadsOf<T>&, T* out, float* memory);
  void (*attend_backward)(const HeadsOf<T>&, const HeadsGradientOf<T>&, float* memory);
};
Kernels<float> kernels_of(float) {
  return {HWY_DYNAMIC_DISPATCH(attend_f32), HWY_DYNAMIC_DISPATCH(attend_backward_f32)};
}
Kernels<bf16> kernels_of(bf16) {
  return {HWY_DYNAMIC_DISPATCH(attend_bf16), HWY_DYNAMIC_DISPATCH(attend_backward_bf16)};
}
Kernels<f16> kernels_of(f16) {
  return {HWY_DYNAMIC_DISPATCH(attend_f16), HWY_DYNAMIC_DISPATCH(attend_backward_f16)};
}

/// The sizes of a call.
struct Sizes {
  std::size_t batch = 0, queries = 0, rows = 0;  ///< rows of k and v
  std::size_t heads = 0, kv_heads = 0, size = 0, keys = 0;
  std::size_t group() const { return heads / kv_heads; }
};

struct Inputs {
  const Tensor &out, &log_sum, &q, &k, &v;
  const AttentionOptions& options;
};

/// Whether the shapes fit; their sizes.
bool fits(const Inputs& in, Sizes& s) {
  const AttentionOptions& o = in.options;
  const int kv_heads = o.kv_heads ? o.kv_heads : o.heads;
  if (o.heads < 1 || kv_heads < 1 || o.heads % kv_heads != 0) return false;
  if (in.q.shape().dims() != 3 || in.k.shape().dims() != 3) return false;
  s.heads = static_cast<std::size_t>(o.heads), s.kv_heads = static_cast<std::size_t>(kv_heads);
  s.batch = in.q.shape()[0], s.queries = in.q.shape()[1], s.rows = in.k.shape()[1];
  s.size = in.q.shape()[2] / s.heads;
  s.keys = o.keys ? o.keys : s.rows;
  return s.size > 0 && in.q.shape() == Shape{s.batch, s.queries, s.heads * s.size} && s.keys <= s.rows &&
         in.k.shape() == Shape{s.batch, s.rows, s.kv_heads * s.size} && in.v.shape() == in.k.shape() &&
         in.out.shape() == in.q.shape() && in.log_sum.shape() == Shape{s.batch, s.heads, s.queries};
}

/// The name of the operator in messages about shapes.
std::string described(const char* op, const AttentionOptions& o) {
  const std::string keys = o.keys ? concat(", ", o.keys, " keys") : "";
  return concat(op, " with ", o.heads, " heads and ", o.kv_heads ? o.kv_heads : o.heads, " key heads", keys);
}

void check_documents(const char* op, const std::int32_t* starts, const Sizes& s, std::size_t past) {
  for (std::size_t n = 0; n < s.batch * s.queries; ++n) {
    const std::size_t t = n % s.queries;
    if (static_cast<std::size_t>(starts[n]) > past + t || (t > 0 && starts[n] < starts[n - 1]))
      fail(Errc::invalid_argument, op, ": document_starts[", n / s.queries, ", ", t, "] = ", starts[n],
           ", expected at least that of the query before it, and at most its position ", past + t);
  }
}

void check_options(const char* op, const Inputs& in, const Sizes& s) {
  const AttentionOptions& o = in.options;
  require(o.window == 0 || o.causal, Errc::invalid_argument, op, ": a window of ", o.window,
          " keys needs `causal`");
  require(std::isfinite(o.scale), Errc::invalid_argument, op, ": scale is ", o.scale);
  check_dtype(op, DType::f32, {{"log_sum", in.log_sum}});
  const auto check = [&](const char* what, const Tensor& t, std::size_t count, std::size_t limit) {
    check_indices(op, {what, t}, count, limit);
    require(t.device() == in.q.device(), Errc::invalid_argument, op, ": ", what, " are on ", name(t.device()),
            ", q is on ", name(in.q.device()));
  };
  if (o.key_counts.defined()) check("key_counts", o.key_counts, s.batch, s.keys + 1);
  if (!o.document_starts.defined()) return;
  require(o.causal, Errc::invalid_argument, op, ": document_starts need `causal`");
  check("document_starts", o.document_starts, s.batch * s.queries, o.past + s.queries);
  if (o.document_starts.device().kind == Device::host && !is_meta(o.document_starts.device()))
    check_documents(op, o.document_starts.data<std::int32_t>(), s, o.past);
}

/// Calls f(heads, sequence, first query head, key head) for groups of `together` query heads.
template <class T, class F>
void each_group(const char* op, const Inputs& in, const Sizes& s, std::size_t together,
                const DropoutMask& mask, const Stream& stream, const F& f) {
  kernels::DropoutParams dropping = kernels::dropout_params(op, mask);
  dropping.read_seed();
  const AttentionOptions& o = in.options;
  const auto scale = o.scale != 0 ? o.scale : static_cast<float>(1 / std::sqrt(static_cast<double>(s.size)));
  const T *q = in.q.data<T>(), *k = in.k.data<T>(), *v = in.v.data<T>();
  float* log_sum = in.log_sum.data<float>();
  const std::int32_t* counts = o.key_counts.defined() ? o.key_counts.data<std::int32_t>() : nullptr;
  const std::int32_t* starts = o.document_starts.defined() ? o.document_starts.data<std::int32_t>() : nullptr;
  const std::size_t groups = s.heads / together;
  stream.parallel_for(s.batch * groups, 1, [&](std::size_t begin, std::size_t end) {
    for (std::size_t n = begin; n < end; ++n) {
      const std::size_t b = n / groups, h = n % groups * together, key_head = h / s.group();
      const std::size_t first_row = (b * s.heads + h) * s.queries, in_key = key_head * s.size;
      const kernels::VisibleKeys visible{counts ? static_cast<std::size_t>(counts[b]) : s.keys, o.causal,
                                         o.past, o.window ? o.window : ~std::size_t{0},
                                         starts ? starts + b * s.queries : nullptr};
      f(HeadsOf<T>{together, s.queries, s.size, in.q.row_stride(), in.k.row_stride(), in.v.row_stride(),
                   s.heads * s.size, scale, q + b * s.queries * in.q.row_stride() + h * s.size,
                   k + b * s.rows * in.k.row_stride() + in_key, v + b * s.rows * in.v.row_stride() + in_key,
                   log_sum + first_row, visible, dropping, dropping.decision(first_row * s.keys), s.keys},
        b, h, key_head);
    }
  });
}

}  // namespace

void find_document_starts(std::span<std::int32_t> starts, std::span<const std::int32_t> tokens,
                          std::int32_t eos_token_id) {
  require(starts.size() == tokens.size(), Errc::invalid_argument, "find_document_starts: ", starts.size(),
          " starts of ", tokens.size(), " tokens");
  std::size_t start = 0;
  for (std::size_t t = 0; t < tokens.size(); ++t) {
    if (t > 0 && tokens[t - 1] == eos_token_id) start = t;
    starts[t] = static_cast<std::int32_t>(start);
  }
}

void attention(const Tensor& out, const Tensor& log_sum, const Tensor& q, const Tensor& k, const Tensor& v,
               const AttentionOptions& options, const DropoutMask& mask, const Stream& stream) {
  constexpr const char* op = "attention";
  const Inputs in{out, log_sum, q, k, v, options};
  Sizes s;
  const bool right = fits(in, s);
  check(right ? op : described(op, options).c_str(),
        {{"out", out}, {"log_sum", log_sum}, {"q", q}, {"k", k}, {"v", v}}, right, Rows::any_stride);
  check(op, {{"out", out}, {"log_sum", log_sum}}, true);
  check_dtype(op, q.dtype(), {{"out", out}, {"k", k}, {"v", v}});
  check_options(op, in, s);
  if (const auto* d = on_device(op, out, stream))
    return d->attention(out, log_sum, q, k, v, options, mask, stream);
  dispatch_dtype(q.dtype(), [&](auto t) {
    using T = decltype(t);
    const Kernels<T> kernels = kernels_of(t);
    T* to = out.data<T>();
    const bool few = s.queries <= 4 && s.queries < s.keys;
    each_group<T>(op, in, s, few ? s.group() : 1, mask, stream,
                  [&](const HeadsOf<T>& h, std::size_t b, std::size_t head, std::size_t) {
                    T* const o = to + b * s.queries * h.out_stride + head * s.size;
                    const std::size_t rows = h.heads * h.queries;
                    if (few)
                      return kernels::attend_few(
                          h, o, thread_memory(rows * (2 * kernels::few_width(s.size) + s.keys)));
                    const std::size_t wide = sizeof(T) == 2 ? 2 * (s.queries + s.keys) * s.size : 0;
                    kernels.attend(h, o, thread_memory(kernels::packed_floats(s.size) + wide));
                  });
  });
}

void attention_backward(const Tensor& d_q, const Tensor& d_k, const Tensor& d_v, const Tensor& d_out,
                        const Tensor& out, const Tensor& log_sum, const Tensor& q, const Tensor& k,
                        const Tensor& v, const AttentionOptions& options, const DropoutMask& mask,
                        const Stream& stream) {
  constexpr const char* op = "attention_backward";
  const Inputs in{out, log_sum, q, k, v, options};
  Sizes s;
  const bool right = fits(in, s) && d_q.shape() == q.shape() && d_k.shape() == k.shape() &&
                     d_v.shape() == v.shape() && d_out.shape() == out.shape();
  check(right ? op : described(op, options).c_str(),
        {{"d_q", d_q},
         {"d_k", d_k},
         {"d_v", d_v},
         {"d_out", d_out},
         {"out", out},
         {"log_sum", log_sum},
         {"q", q},
         {"k", k},
         {"v", v}},
        right, Rows::any_stride);
  check(op, {{"d_out", d_out}, {"out", out}, {"log_sum", log_sum}}, true);
  check_dtype(op, q.dtype(),
              {{"d_q", d_q}, {"d_k", d_k}, {"d_v", d_v}, {"d_out", d_out}, {"out", out}, {"k", k}, {"v", v}});
  check_options(op, in, s);
  if (const auto* d = on_device(op, d_q, stream))
    return d->attention_backward(d_q, d_k, d_v, d_out, out, log_sum, q, k, v, options, mask, stream);
  dispatch_dtype(q.dtype(), [&](auto t) {
    using T = decltype(t);
    const auto attend_backward = kernels_of(t).attend_backward;
    T *dq = d_q.data<T>(), *dk = d_k.data<T>(), *dv = d_v.data<T>();
    const T *o = out.data<T>(), *dy = d_out.data<T>();
    each_group<T>(op, in, s, s.group(), mask, stream,
                  [&](const HeadsOf<T>& h, std::size_t b, std::size_t head, std::size_t key_head) {
                    const std::size_t at = b * s.queries * h.out_stride + head * s.size,
                                      in_key = key_head * s.size;
                    const auto rows = [](T* first, const Tensor& t, std::size_t row) {
                      return first + row * t.row_stride();
                    };
                    const std::size_t wide = sizeof(T) == 2 ? 4 * (s.queries + s.rows) * s.size : 0;
                    attend_backward(h,
                                    {o + at, dy + at, rows(dq, d_q, b * s.queries) + head * s.size,
                                     rows(dk, d_k, b * s.rows) + in_key, rows(dv, d_v, b * s.rows) + in_key,
                                     d_q.row_stride(), d_k.row_stride(), d_v.row_stride(), s.rows},
                                    thread_memory(kernels::packed_gradient_floats(s.size) + wide));
                  });
  });
}

}  // namespace ops
}  // namespace rz
#endif
