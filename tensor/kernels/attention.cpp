// Per (batch, head), by tiles of 64 queries and 64 keys; tiles above the diagonal are skipped. Forward keeps
// a running maximum and sum a query (Milakov and Gimelshein, arXiv:1805.02867; Dao et al.,
// arXiv:2205.14135), so that scores live in one tile on the stack whatever T is. Backward makes the
// probabilities again from log_sum.

#include "tensor/ops.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tensor/kernels/attention.cpp"
#include "tensor/kernels/targets.h"
// after the targets
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "tensor/kernels/check.h"
#include "tensor/kernels/gemm.h"
#include "tensor/kernels/vector-inl.h"

#ifndef RZ_ATTENTION_TILE
#define RZ_ATTENTION_TILE
namespace rz::ops {
constexpr std::size_t tile = 64;
}
#endif

HWY_BEFORE_NAMESPACE();
namespace rz {
namespace HWY_NAMESPACE {

/// scores[0 … n) → e^(score - shift), the others up to `width` 0; returns their sum.
float exponentials(float* scores, std::size_t n, std::size_t width, float shift) {
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
  std::memset(scores + n, 0, (width - n) * sizeof(float));
  return hn::GetLane(hn::SumOfLanes(d, total));
}

float largest_score(const float* scores, std::size_t n) { return largest(scores, n); }

void multiply_row(float* row, std::size_t n, float factor) { RZ_EACH(i, 0, n) row[i] *= factor; }

float dot(const float* a, const float* b, std::size_t n) {
  return static_cast<float>(sum(
      n, [](auto x, auto y) HWY_ATTR { return hn::Mul(x, y); }, a, b));
}

/// d_scores = p · (d_p - delta) · scale, in place of d_p.
void score_gradient(float* HWY_RESTRICT d_p, const float* HWY_RESTRICT p, std::size_t n, float delta,
                    float scale) {
  for (std::size_t i = 0; i < n; ++i) d_p[i] = p[i] * (d_p[i] - delta) * scale;
}

}  // namespace HWY_NAMESPACE
}  // namespace rz
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace rz {

HWY_EXPORT(exponentials);
HWY_EXPORT(largest_score);
HWY_EXPORT(multiply_row);
HWY_EXPORT(dot);
HWY_EXPORT(score_gradient);

namespace ops {

namespace {

using kernels::gemm;

/// One head of one sequence: rows of T tokens, `stride` apart in qkv and `channels` apart in out.
struct Head {
  std::size_t tokens, size, channels, stride;
  float scale;
  const float *q, *k, *v;
  float* log_sum;

  /// tokens of the tile that begins at i
  std::size_t span(std::size_t i) const { return std::min(tile, tokens - i); }
};

using Tile = float[tile * tile];

/// scale · q kᵀ of the tile's queries and keys.
void score(Tile& scores, const Head& h, std::size_t i, std::size_t j) {
  gemm(scores, tile, h.span(i), h.span(j), h.size, h.scale, {h.q + i * h.stride, h.stride},
       {h.k + j * h.stride, h.stride, true}, 0);
}

/// How many keys of the tile at j the query i may see.
std::size_t visible(const Head& h, std::size_t i, std::size_t j) { return std::min(h.span(j), i - j + 1); }

void attend_tile(const Head& h, float* out, std::size_t i) {
  alignas(64) Tile scores;
  float most[tile], total[tile];
  std::fill(most, most + tile, -std::numeric_limits<float>::infinity());
  std::fill(total, total + tile, 0.0f);
  for (std::size_t j = 0; j <= i; j += tile) {
    score(scores, h, i, j);
    for (std::size_t r = 0; r < h.span(i); ++r) {
      float* row = scores + r * tile;
      const std::size_t n = visible(h, i + r, j);
      const float before = most[r];
      most[r] = std::max(before, HWY_DYNAMIC_DISPATCH(largest_score)(row, n));
      const float sum = HWY_DYNAMIC_DISPATCH(exponentials)(row, n, h.span(j), most[r]);
      const float keep = j ? std::exp(before - most[r]) : 0;
      total[r] = total[r] * keep + sum;
      if (j && keep != 1) HWY_DYNAMIC_DISPATCH(multiply_row)(out + (i + r) * h.channels, h.size, keep);
    }
    gemm(out + i * h.channels, h.channels, h.span(i), h.size, h.span(j), 1, {scores, tile},
         {h.v + j * h.stride, h.stride}, j ? 1 : 0);
  }
  for (std::size_t r = 0; r < h.span(i); ++r) {
    HWY_DYNAMIC_DISPATCH(multiply_row)(out + (i + r) * h.channels, h.size, 1 / total[r]);
    h.log_sum[i + r] = static_cast<float>(most[r] + std::log(static_cast<double>(total[r])));
  }
}

struct HeadGradient {
  const float *out, *d_out;
  float *d_q, *d_k, *d_v;
};

void attend_tile_backward(const Head& h, const HeadGradient& g, std::size_t i) {
  alignas(64) Tile p;
  alignas(64) Tile d_p;
  const std::size_t queries = h.span(i);
  const float* d_out = g.d_out + i * h.channels;
  float delta[tile];
  for (std::size_t r = 0; r < queries; ++r)
    delta[r] = HWY_DYNAMIC_DISPATCH(dot)(d_out + r * h.channels, g.out + (i + r) * h.channels, h.size);
  for (std::size_t j = 0; j <= i; j += tile) {
    const std::size_t keys = h.span(j);
    const float beta = i == j ? 0 : 1;  // the diagonal is a key's first tile
    score(p, h, i, j);
    for (std::size_t r = 0; r < queries; ++r)
      HWY_DYNAMIC_DISPATCH(exponentials)(p + r * tile, visible(h, i + r, j), keys, h.log_sum[i + r]);
    gemm(g.d_v + j * h.stride, h.stride, keys, h.size, queries, 1, {p, tile, true}, {d_out, h.channels},
         beta);
    gemm(d_p, tile, queries, keys, h.size, 1, {d_out, h.channels}, {h.v + j * h.stride, h.stride, true}, 0);
    for (std::size_t r = 0; r < queries; ++r)
      HWY_DYNAMIC_DISPATCH(score_gradient)(d_p + r * tile, p + r * tile, keys, delta[r], h.scale);
    gemm(g.d_q + i * h.stride, h.stride, queries, h.size, keys, 1, {d_p, tile},
         {h.k + j * h.stride, h.stride}, j ? 1 : 0);
    gemm(g.d_k + j * h.stride, h.stride, keys, h.size, queries, 1, {d_p, tile, true},
         {h.q + i * h.stride, h.stride}, beta);
  }
}

/// f(head, index of its first element in out and in qkv) for every head of every sequence.
template <class F>
void each_head(const Tensor& qkv, const Tensor& log_sum, int heads, const Stream& stream, const F& f) {
  const std::size_t count = static_cast<std::size_t>(heads), tokens = qkv.shape()[1];
  const std::size_t channels = last(qkv) / 3, size = channels / count;
  const auto scale = static_cast<float>(1 / std::sqrt(static_cast<double>(size)));
  const float* x = qkv.data<float>();
  float* l = log_sum.data<float>();
  stream.parallel_for(qkv.shape()[0] * count, 1, [&](std::size_t begin, std::size_t end) {
    for (std::size_t n = begin; n < end; ++n) {
      const std::size_t at = n / count * tokens * channels + n % count * size;
      const std::size_t at_qkv = n / count * tokens * 3 * channels + n % count * size;
      const float* q = x + at_qkv;
      f(Head{tokens, size, channels, 3 * channels, scale, q, q + channels, q + 2 * channels, l + n * tokens},
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
                      const Stream& stream) {
  const bool right = fits(out, log_sum, qkv, heads);
  check(right ? "causal_attention" : str("causal_attention with ", heads, " heads").c_str(),
        {{"out", out}, {"log_sum", log_sum}, {"qkv", qkv}}, right);
  float* o = out.data<float>();
  each_head(qkv, log_sum, heads, stream, [&](const Head& h, std::size_t at, std::size_t) {
    for (std::size_t i = 0; i < h.tokens; i += tile) attend_tile(h, o + at, i);
  });
}

void causal_attention_backward(const Tensor& d_qkv, const Tensor& d_out, const Tensor& out,
                               const Tensor& log_sum, const Tensor& qkv, int heads, const Stream& stream) {
  const bool right =
      fits(out, log_sum, qkv, heads) && d_qkv.shape() == qkv.shape() && d_out.shape() == out.shape();
  check(right ? "causal_attention_backward" : str("causal_attention_backward with ", heads, " heads").c_str(),
        {{"d_qkv", d_qkv}, {"d_out", d_out}, {"out", out}, {"log_sum", log_sum}, {"qkv", qkv}}, right);
  float* d = d_qkv.data<float>();
  const float *o = out.data<float>(), *dy = d_out.data<float>();
  each_head(qkv, log_sum, heads, stream, [&](const Head& h, std::size_t at, std::size_t at_qkv) {
    float* d_q = d + at_qkv;
    const HeadGradient g{o + at, dy + at, d_q, d_q + h.channels, d_q + 2 * h.channels};
    for (std::size_t i = 0; i < h.tokens; i += tile) attend_tile_backward(h, g, i);
  });
}

}  // namespace ops
}  // namespace rz
#endif
