// Attention on the CPU, per (batch, head), in tiles of 64 queries and 64 keys; tiles above the diagonal are
// skipped. Forward keeps a running maximum and sum per query (Milakov and Gimelshein, arXiv:1805.02867; Dao
// et al., arXiv:2205.14135), so that scores need one tile on the stack for any T. Backward recomputes the
// probabilities from log_sum. The tiles are too small for a BLAS to be fast, and a BLAS cannot skip half of a
// diagonal tile, so the products are implemented here, with the second operand packed into a tile. Heads of
// 16-bit tensors are converted to f32 first, and their results are rounded once, at the end.

#include "tensor/ops.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tensor/kernels/attention/attention.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "tensor/kernels/attention/attention.h"
#include "tensor/kernels/check.h"
#include "tensor/kernels/device_ops.h"
#include "tensor/kernels/elementwise/dropout-inl.h"
#include "tensor/kernels/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace rz {
namespace HWY_NAMESPACE {

using kernels::Head;
using kernels::HeadGradient;
using kernels::Part;
using kernels::tile;
using kernels::Tile;
using kernels::TileProduct;

// ---- products of tiles

void pack(Tile& to, const float* from, std::size_t stride, std::size_t rows, std::size_t columns) {
  for (std::size_t i = 0; i < rows; ++i) {
    std::memcpy(to + i * tile, from + i * stride, columns * sizeof(float));
    std::memset(to + i * tile + columns, 0, (tile - columns) * sizeof(float));
  }
}

/// Packs the transpose: rows of `to` are columns of `from`.
void pack_transposed(Tile& to, const float* from, std::size_t stride, std::size_t rows, std::size_t columns) {
  for (std::size_t j = 0; j < columns; ++j) {
    for (std::size_t i = 0; i < rows; ++i) to[j * tile + i] = from[i * stride + j];
    std::memset(to + j * tile + rows, 0, (tile - rows) * sizeof(float));
  }
}

HWY_INLINE void store_result(const TileProduct& p, FloatVector sum, std::size_t i, std::size_t j) {
  const Floats d;
  float* c = p.c + i * p.c_stride + j;
  const std::size_t left = p.columns - j;
  const FloatVector scale = hn::Set(d, p.scale);
  if (left >= hn::Lanes(d))
    hn::StoreU(p.add ? hn::MulAdd(sum, scale, hn::LoadU(d, c)) : hn::Mul(sum, scale), d, c);
  else
    store_part(p.add ? hn::MulAdd(sum, scale, load_part(d, c, left, 0)) : hn::Mul(sum, scale), d, c, left);
}

/// A block of `rows` rows from i and `vectors` vectors of columns from j, summed in registers: up to 4 x 2.
template <int rows, int vectors>
HWY_INLINE void multiply_block(const TileProduct& p, std::size_t i, std::size_t j, std::size_t first,
                               std::size_t past) {
  const Floats d;
  const std::size_t lanes = hn::Lanes(d);
  FloatVector sum[4][2];
  for (int r = 0; r < rows; ++r)
    for (int v = 0; v < vectors; ++v) sum[r][v] = hn::Zero(d);
  const float* a = p.a + i * p.a_row;
  for (std::size_t k = first; k < past; ++k) {
    const float* b = p.b + k * tile + j;
    const FloatVector left = hn::LoadU(d, b), right = vectors > 1 ? hn::LoadU(d, b + lanes) : left;
    for (int r = 0; r < rows; ++r) {
      const FloatVector factor = hn::Set(d, a[static_cast<std::size_t>(r) * p.a_row + k * p.a_step]);
      sum[r][0] = hn::MulAdd(factor, left, sum[r][0]);
      if (vectors > 1) sum[r][1] = hn::MulAdd(factor, right, sum[r][1]);
    }
  }
  for (int r = 0; r < rows; ++r)
    for (int v = 0; v < vectors; ++v)
      store_result(p, sum[r][v], i + static_cast<std::size_t>(r), j + static_cast<std::size_t>(v) * lanes);
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
  for (; i + 4 <= p.rows; i += 4) multiply_rows<4>(p, i);
  for (; i < p.rows; ++i) multiply_rows<1>(p, i);
}

// ---- rows of scores

/// scores[0 … n) = e^(score - shift), the rest of the tile's row = 0. Returns the sum.
float exponentials(float* scores, std::size_t n, float shift) {
  const Floats d;
  const std::size_t lanes = hn::Lanes(d);
  const auto offset = hn::Set(d, shift);
  FloatVector total = hn::Zero(d);
  std::size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto e = exponential(hn::Sub(hn::LoadU(d, scores + i), offset));
    hn::StoreU(e, d, scores + i);
    total = hn::Add(total, e);
  }
  if (i < n) {
    const float lowest = -std::numeric_limits<float>::infinity();
    const auto e = exponential(hn::Sub(load_part(d, scores + i, n - i, lowest), offset));
    store_part(e, d, scores + i, n - i);
    total = hn::Add(total, e);
  }
  std::memset(scores + n, 0, (tile - n) * sizeof(float));
  return hn::GetLane(hn::SumOfLanes(d, total));
}

void multiply_row(float* row, std::size_t n, float factor) {
  for (std::size_t i = 0; i < n; ++i) row[i] *= factor;
}

/// Computes d_scores = p · (d_p - delta) · scale in place of d_p; 0 beyond n.
void score_gradient(float* HWY_RESTRICT d_p, const float* HWY_RESTRICT p, std::size_t n, float delta,
                    float scale) {
  for (std::size_t i = 0; i < n; ++i) d_p[i] = p[i] * (d_p[i] - delta) * scale;
  std::memset(d_p + n, 0, (tile - n) * sizeof(float));
}

// ---- heads

/// Applies dropout to a row of probabilities or of their gradients: query i, keys from j.
void drop_row(const Head& h, float* row, std::size_t i, std::size_t j) {
  if (h.dropout.active()) drop(row, row, h.visible(i, j), h.decision(i, j), h.dropout);
}

/// c = scale · a · bᵀ over `size` channels, for the queries of the tile at i and the keys of the tile at j.
void multiply_transposed(Tile& c, const Head& h, std::size_t i, std::size_t j, const float* a,
                         std::size_t a_stride, const float* b, float scale) {
  alignas(64) Tile packed;
  for (std::size_t d = 0; d < h.size; d += tile) {
    pack_transposed(packed, b + j * h.stride + d, h.stride, h.span(j), h.width(d));
    multiply({c, tile, a + i * a_stride + d, a_stride, 1, packed, h.span(i), tile, h.width(d), scale, d > 0,
              i == j ? Part::lower_result : Part::whole});
  }
}

/// Rows of c at `to` (`c_stride` apart) = weights · rows of b at `from` (`b_stride` apart). With `transposed`
/// weights the rows of c are keys, otherwise queries.
void mix(const Head& h, float* c, std::size_t c_stride, std::size_t to, const Tile& weights, bool transposed,
         const float* b, std::size_t b_stride, std::size_t from, bool add) {
  alignas(64) Tile packed;
  const Part triangle = transposed ? Part::upper : Part::lower;
  for (std::size_t d = 0; d < h.size; d += tile) {
    pack(packed, b + from * b_stride + d, b_stride, h.span(from), h.width(d));
    multiply({c + to * c_stride + d, c_stride, weights, transposed ? 1 : tile, transposed ? tile : 1, packed,
              h.span(to), h.width(d), h.span(from), 1, add, to == from ? triangle : Part::whole});
  }
}

void attend_tile(const Head& h, float* out, std::size_t i) {
  alignas(64) Tile scores;
  float row_max[tile], total[tile];
  std::fill(row_max, row_max + tile, -std::numeric_limits<float>::infinity());
  std::fill(total, total + tile, 0.0f);
  for (std::size_t j = 0; j <= i; j += tile) {
    multiply_transposed(scores, h, i, j, h.q, h.stride, h.k, h.scale);
    for (std::size_t r = 0; r < h.span(i); ++r) {
      float* row = scores + r * tile;
      const std::size_t n = h.visible(i + r, j);
      const float before = row_max[r];
      row_max[r] = std::max(before, largest(row, n));
      const float sum = exponentials(row, n, row_max[r]);
      const float keep = j ? std::exp(before - row_max[r]) : 0;
      total[r] = total[r] * keep + sum;
      drop_row(h, row, i + r, j);
      if (j && keep != 1) multiply_row(out + (i + r) * h.channels, h.size, keep);
    }
    mix(h, out, h.channels, i, scores, false, h.v, h.stride, j, j > 0);
  }
  for (std::size_t r = 0; r < h.span(i); ++r) {
    multiply_row(out + (i + r) * h.channels, h.size, 1 / total[r]);
    h.log_sum[i + r] = static_cast<float>(row_max[r] + std::log(static_cast<double>(total[r])));
  }
}

void attend_tile_backward(const Head& h, const HeadGradient& g, std::size_t i) {
  alignas(64) Tile p;
  alignas(64) Tile d_p;
  float delta[tile];
  for (std::size_t r = 0; r < h.span(i); ++r) {
    const std::size_t at = (i + r) * h.channels;
    const auto product = [](auto x, auto y) HWY_ATTR { return hn::Mul(x, y); };
    delta[r] = static_cast<float>(sum(h.size, product, g.d_out + at, g.out + at));
  }
  for (std::size_t j = 0; j <= i; j += tile) {
    const bool add = i != j;  // a key's first tile is the diagonal one
    multiply_transposed(p, h, i, j, h.q, h.stride, h.k, h.scale);
    multiply_transposed(d_p, h, i, j, g.d_out, h.channels, h.v, 1);
    for (std::size_t r = 0; r < h.span(i); ++r) {
      const std::size_t n = h.visible(i + r, j);
      exponentials(p + r * tile, n, h.log_sum[i + r]);
      drop_row(h, d_p + r * tile, i + r, j);
      score_gradient(d_p + r * tile, p + r * tile, n, delta[r], h.scale);
      drop_row(h, p + r * tile, i + r, j);
    }
    mix(h, g.d_v, h.stride, j, p, true, g.d_out, h.channels, i, add);
    mix(h, g.d_q, h.stride, i, d_p, false, h.k, h.stride, j, j > 0);
    mix(h, g.d_k, h.stride, j, d_p, true, h.q, h.stride, i, add);
  }
}

void attend(const Head& h, float* out) {
  for (std::size_t i = 0; i < h.tokens; i += tile) attend_tile(h, out, i);
}

void attend_backward(const Head& h, const HeadGradient& g) {
  for (std::size_t i = 0; i < h.tokens; i += tile) attend_tile_backward(h, g, i);
}

// ---- heads of 16-bit tensors

/// `rows` rows of n elements; strides are in elements between rows.
template <class To, class From>
void convert_rows(To* to, std::size_t to_stride, const From* from, std::size_t from_stride, std::size_t rows,
                  std::size_t n) {
  for (std::size_t i = 0; i < rows; ++i)
    map(
        to + i * to_stride, n, [](auto x) HWY_ATTR { return x; }, from + i * from_stride);
}

/// The head in f32 in `memory`, 3 · tokens · size elements, with rows of `size` elements.
template <class T>
Head widened(const kernels::HeadOf<T>& h, float* memory) {
  const std::size_t count = h.tokens * h.size;
  convert_rows(memory, h.size, h.q, h.stride, h.tokens, h.size);
  convert_rows(memory + count, h.size, h.k, h.stride, h.tokens, h.size);
  convert_rows(memory + 2 * count, h.size, h.v, h.stride, h.tokens, h.size);
  return {h.tokens,           h.size,    h.size,    h.size,     h.scale, memory, memory + count,
          memory + 2 * count, h.log_sum, h.dropout, h.decisions};
}

template <class T>
void attend_as(const kernels::HeadOf<T>& h, T* out, float* memory) {
  const std::size_t count = h.tokens * h.size;
  float* const wide_out = memory + 3 * count;
  attend(widened(h, memory), wide_out);
  convert_rows(out, h.channels, wide_out, h.size, h.tokens, h.size);
}

template <class T>
void attend_backward_as(const kernels::HeadOf<T>& h, const kernels::HeadGradientOf<T>& g, float* memory) {
  const std::size_t count = h.tokens * h.size;
  float *const out = memory + 3 * count, *const d_out = out + count, *const d_q = d_out + count,
               *const d_k = d_q + count, *const d_v = d_k + count;
  convert_rows(out, h.size, g.out, h.channels, h.tokens, h.size);
  convert_rows(d_out, h.size, g.d_out, h.channels, h.tokens, h.size);
  attend_backward(widened(h, memory), {out, d_out, d_q, d_k, d_v});
  convert_rows(g.d_q, h.stride, d_q, h.size, h.tokens, h.size);
  convert_rows(g.d_k, h.stride, d_k, h.size, h.tokens, h.size);
  convert_rows(g.d_v, h.stride, d_v, h.size, h.tokens, h.size);
}

void attend_bf16(const kernels::HeadOf<bf16>& h, bf16* out, float* memory) { attend_as(h, out, memory); }
void attend_f16(const kernels::HeadOf<f16>& h, f16* out, float* memory) { attend_as(h, out, memory); }
void attend_backward_bf16(const kernels::HeadOf<bf16>& h, const kernels::HeadGradientOf<bf16>& g,
                          float* memory) {
  attend_backward_as(h, g, memory);
}
void attend_backward_f16(const kernels::HeadOf<f16>& h, const kernels::HeadGradientOf<f16>& g,
                         float* memory) {
  attend_backward_as(h, g, memory);
}

}  // namespace HWY_NAMESPACE
}  // namespace rz
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace rz {

HWY_EXPORT(attend);
HWY_EXPORT(attend_bf16);
HWY_EXPORT(attend_f16);
HWY_EXPORT(attend_backward);
HWY_EXPORT(attend_backward_bf16);
HWY_EXPORT(attend_backward_f16);

namespace ops {

namespace {

using kernels::Head;
using kernels::HeadGradientOf;
using kernels::HeadOf;

/// Memory of the calling thread for `count` floats.
float* thread_memory(std::size_t count) {
  static thread_local std::vector<float> memory;
  if (memory.size() < count) memory.resize(count);
  return memory.data();
}

void run(const HeadOf<float>& h, float* out) { HWY_DYNAMIC_DISPATCH(attend)(h, out); }
void run(const HeadOf<bf16>& h, bf16* out) {
  HWY_DYNAMIC_DISPATCH(attend_bf16)(h, out, thread_memory(4 * h.tokens * h.size));
}
void run(const HeadOf<f16>& h, f16* out) {
  HWY_DYNAMIC_DISPATCH(attend_f16)(h, out, thread_memory(4 * h.tokens * h.size));
}
void run_backward(const HeadOf<float>& h, const HeadGradientOf<float>& g) {
  HWY_DYNAMIC_DISPATCH(attend_backward)(h, g);
}
void run_backward(const HeadOf<bf16>& h, const HeadGradientOf<bf16>& g) {
  HWY_DYNAMIC_DISPATCH(attend_backward_bf16)(h, g, thread_memory(8 * h.tokens * h.size));
}
void run_backward(const HeadOf<f16>& h, const HeadGradientOf<f16>& g) {
  HWY_DYNAMIC_DISPATCH(attend_backward_f16)(h, g, thread_memory(8 * h.tokens * h.size));
}

/// Calls f(head, offset in out, offset in qkv) for every head of every sequence.
template <class T, class F>
void each_head(const Tensor& qkv, const Tensor& log_sum, int heads, const DropoutMask& mask,
               const Stream& stream, const F& f) {
  kernels::DropoutParams dropping = kernels::dropout_params("causal_attention", mask);
  dropping.read_seed();
  const std::size_t count = static_cast<std::size_t>(heads), tokens = qkv.shape()[1];
  const std::size_t channels = last(qkv) / 3, size = channels / count;
  const auto scale = static_cast<float>(1 / std::sqrt(static_cast<double>(size)));
  const T* x = qkv.data<T>();
  float* l = log_sum.data<float>();
  stream.parallel_for(qkv.shape()[0] * count, 1, [&](std::size_t begin, std::size_t end) {
    for (std::size_t n = begin; n < end; ++n) {
      const std::size_t at = n / count * tokens * channels + n % count * size;
      const std::size_t at_qkv = n / count * tokens * 3 * channels + n % count * size;
      const T* q = x + at_qkv;
      f(HeadOf<T>{tokens, size, channels, 3 * channels, scale, q, q + channels, q + 2 * channels,
                  l + n * tokens, dropping, mask.offset + n * tokens * tokens},
        at, at_qkv);
    }
  });
}

bool fits(const Tensor& out, const Tensor& log_sum, const Tensor& qkv, int heads) {
  if (qkv.shape().dims() != 3 || heads < 1) return false;
  const std::size_t b = qkv.shape()[0], t = qkv.shape()[1], h = static_cast<std::size_t>(heads);
  const std::size_t c = qkv.shape()[2] / 3;
  return qkv.shape()[2] == 3 * c && c > 0 && c % h == 0 && out.shape() == Shape{b, t, c} &&
         log_sum.shape() == Shape{b, h, t};
}

}  // namespace

void causal_attention(const Tensor& out, const Tensor& log_sum, const Tensor& qkv, int heads,
                      const DropoutMask& mask, const Stream& stream) {
  const bool right = fits(out, log_sum, qkv, heads);
  check(right ? "causal_attention" : concat("causal_attention with ", heads, " heads").c_str(),
        {{"out", out}, {"log_sum", log_sum}, {"qkv", qkv}}, right);
  if (const auto* d = on_device("causal_attention", out, stream))
    return d->causal_attention(out, log_sum, qkv, heads, mask, stream);
  check_dtype("causal_attention", qkv.dtype(), {{"out", out}});
  dispatch_dtype(qkv.dtype(), [&](auto t) {
    using T = decltype(t);
    T* o = out.data<T>();
    each_head<T>(qkv, log_sum, heads, mask, stream,
                 [&](const HeadOf<T>& h, std::size_t at, std::size_t) { run(h, o + at); });
  });
}

void causal_attention_backward(const Tensor& d_qkv, const Tensor& d_out, const Tensor& out,
                               const Tensor& log_sum, const Tensor& qkv, int heads, const DropoutMask& mask,
                               const Stream& stream) {
  const bool right =
      fits(out, log_sum, qkv, heads) && d_qkv.shape() == qkv.shape() && d_out.shape() == out.shape();
  check(right ? "causal_attention_backward"
              : concat("causal_attention_backward with ", heads, " heads").c_str(),
        {{"d_qkv", d_qkv}, {"d_out", d_out}, {"out", out}, {"log_sum", log_sum}, {"qkv", qkv}}, right);
  if (const auto* d = on_device("causal_attention_backward", d_qkv, stream))
    return d->causal_attention_backward(d_qkv, d_out, out, log_sum, qkv, heads, mask, stream);
  check_dtype("causal_attention_backward", qkv.dtype(), {{"d_qkv", d_qkv}, {"d_out", d_out}, {"out", out}});
  dispatch_dtype(qkv.dtype(), [&](auto t) {
    using T = decltype(t);
    T* d = d_qkv.data<T>();
    const T *o = out.data<T>(), *dy = d_out.data<T>();
    each_head<T>(qkv, log_sum, heads, mask, stream,
                 [&](const HeadOf<T>& h, std::size_t at, std::size_t at_qkv) {
                   T* d_q = d + at_qkv;
                   run_backward(h, {o + at, dy + at, d_q, d_q + h.channels, d_q + 2 * h.channels});
                 });
  });
}

}  // namespace ops
}  // namespace rz
#endif
