// Attention of a few queries to a long cache. It reads each row of k and v once, from where it is.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tensor/kernels/attention/attention_few.cpp"
#include <hwy/cache_control.h>
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "tensor/kernels/attention/attention.h"
#include "tensor/kernels/attention/scores-inl.h"
#include "tensor/kernels/elementwise/dropout-inl.h"

HWY_BEFORE_NAMESPACE();
namespace rz {
namespace HWY_NAMESPACE {

using kernels::Heads;
using kernels::HeadsOf;

constexpr std::size_t key_block = 64;  ///< keys whose rows stay in the first cache for all queries

/// Prefetches 4 rows of a head, which is some keys ahead. Processors do not foresee addresses that are as far
/// apart as the rows of a cache.
template <class T>
HWY_INLINE void prefetch_keys(const T* rows, std::size_t stride, std::size_t size) {
  for (std::size_t i = 0; i < 4; ++i)
    for (std::size_t c = 0; c < size; c += 64 / sizeof(T)) hwy::Prefetch(rows + i * stride + c);
}
constexpr std::size_t prefetched = 16;  ///< how many keys ahead

/// A vector of channels of each of `keys` rows; the second form loads the last n channels.
template <int keys, class T>
HWY_INLINE void load_keys(FloatVector (&x)[keys], const T* rows, std::size_t stride) {
  for (int i = 0; i < keys; ++i) x[i] = load(Floats(), rows + static_cast<std::size_t>(i) * stride);
}
template <int keys, class T>
HWY_INLINE void load_keys_part(FloatVector (&x)[keys], const T* rows, std::size_t stride, std::size_t n) {
  for (int i = 0; i < keys; ++i)
    x[i] = load_part(Floats(), rows + static_cast<std::size_t>(i) * stride, n, 0.0f);
}

/// sum[r][i] += q row r · x[i], for a vector of channels. Rows of q are `width` apart.
template <int rows, int keys>
HWY_INLINE void add_products(FloatVector (&sum)[rows][keys], const FloatVector (&x)[keys], const float* q,
                             std::size_t width) {
  for (int r = 0; r < rows; ++r) {
    const FloatVector y = hn::LoadU(Floats(), q + static_cast<std::size_t>(r) * width);
    for (int i = 0; i < keys; ++i) sum[r][i] = hn::MulAdd(x[i], y, sum[r][i]);
  }
}

/// scores[r][i] = scale · q row r · k row i. Rows of scores are `pitch` apart, those of q `width`.
template <int rows, int keys, class T>
HWY_INLINE void score_keys(float* scores, std::size_t pitch, const float* q, std::size_t width, const T* k,
                           std::size_t k_stride, std::size_t size, float scale) {
  const Floats d;
  const std::size_t lanes = hn::Lanes(d);
  FloatVector sum[rows][keys], x[keys];
  for (int r = 0; r < rows; ++r)
    for (int i = 0; i < keys; ++i) sum[r][i] = hn::Zero(d);
  std::size_t c = 0;
  for (; c + lanes <= size; c += lanes) {
    load_keys(x, k + c, k_stride);
    add_products(sum, x, q + c, width);
  }
  if (c < size) {
    load_keys_part(x, k + c, k_stride, size - c);
    add_products(sum, x, q + c, width);
  }
  for (int r = 0; r < rows; ++r)
    for (int i = 0; i < keys; ++i)
      scores[static_cast<std::size_t>(r) * pitch + static_cast<std::size_t>(i)] =
          hn::GetLane(hn::SumOfLanes(d, sum[r][i])) * scale;
}

/// The same for `count` keys. Prefetches those after them, up to the first `foreseen`.
template <int rows, class T>
HWY_INLINE void score_few(float* scores, std::size_t pitch, const float* q, std::size_t width, const T* k,
                          std::size_t k_stride, std::size_t count, std::size_t foreseen, std::size_t size,
                          float scale) {
  std::size_t j = 0;
  for (; j + 4 <= count; j += 4) {
    if (j + prefetched + 4 <= foreseen) prefetch_keys(k + (j + prefetched) * k_stride, k_stride, size);
    score_keys<rows, 4>(scores + j, pitch, q, width, k + j * k_stride, k_stride, size, scale);
  }
  for (; j < count; ++j)
    score_keys<rows, 1>(scores + j, pitch, q, width, k + j * k_stride, k_stride, size, scale);
}

/// out row r += Σ factor[r][i] · x[i], for a vector of channels. Rows of out are `width` apart.
template <int rows, int keys>
HWY_INLINE void add_weighted(float* out, std::size_t width, const FloatVector (&factor)[rows][keys],
                             const FloatVector (&x)[keys]) {
  const Floats d;
  for (int r = 0; r < rows; ++r) {
    float* const to = out + static_cast<std::size_t>(r) * width;
    FloatVector sum = hn::LoadU(d, to);
    for (int i = 0; i < keys; ++i) sum = hn::MulAdd(factor[r][i], x[i], sum);
    hn::StoreU(sum, d, to);
  }
}

/// out row r += Σ weights[r][i] · v row i. Rows of weights are `pitch` apart, those of out `width`.
template <int rows, int keys, class T>
HWY_INLINE void mix_values(float* out, std::size_t width, const float* weights, std::size_t pitch, const T* v,
                           std::size_t v_stride, std::size_t size) {
  const Floats d;
  const std::size_t lanes = hn::Lanes(d);
  FloatVector factor[rows][keys], x[keys];
  for (int r = 0; r < rows; ++r)
    for (int i = 0; i < keys; ++i)
      factor[r][i] = hn::Set(d, weights[static_cast<std::size_t>(r) * pitch + static_cast<std::size_t>(i)]);
  std::size_t c = 0;
  for (; c + lanes <= size; c += lanes) {
    load_keys(x, v + c, v_stride);
    add_weighted(out + c, width, factor, x);
  }
  if (c < size) {
    load_keys_part(x, v + c, v_stride, size - c);
    add_weighted(out + c, width, factor, x);
  }
}

/// The same for `count` keys.
template <int rows, class T>
HWY_INLINE void mix_few(float* out, std::size_t width, const float* weights, std::size_t pitch, const T* v,
                        std::size_t v_stride, std::size_t count, std::size_t foreseen, std::size_t size) {
  std::size_t j = 0;
  for (; j + 4 <= count; j += 4) {
    if (j + prefetched + 4 <= foreseen) prefetch_keys(v + (j + prefetched) * v_stride, v_stride, size);
    mix_values<rows, 4>(out, width, weights + j, pitch, v + j * v_stride, v_stride, size);
  }
  for (; j < count; ++j)
    mix_values<rows, 1>(out, width, weights + j, pitch, v + j * v_stride, v_stride, size);
}

/// Calls f(rows, first row) for up to four of `count` rows at once.
template <class F>
HWY_INLINE void each_four(std::size_t count, const F& f) {
  std::size_t r = 0;
  for (; r + 4 <= count; r += 4) f(std::integral_constant<int, 4>(), r);
  if (count - r == 3) f(std::integral_constant<int, 3>(), r);
  if (count - r == 2) f(std::integral_constant<int, 2>(), r);
  if (count - r == 1) f(std::integral_constant<int, 1>(), r);
}

/// All heads and queries are rows of one small matrix. Keys in blocks: scores of all, softmax, then values.
template <class T>
HWY_INLINE void attend_few_as(const HeadsOf<T>& h, T* out, float* memory) {
  const std::size_t rows = h.heads * h.queries, width = kernels::few_width(h.size);
  const std::size_t begin = h.visible.begin(0), end = h.visible.end(h.queries - 1);
  const std::size_t count = begin < end ? end - begin : 0;
  float *const q = memory, *const mixed = q + rows * width, *const scores = mixed + rows * width;
  std::memset(memory, 0, 2 * rows * width * sizeof(float));
  for (std::size_t r = 0; r < rows; ++r)
    convert_rows(q + r * width, 0, h.q + r % h.queries * h.q_stride + r / h.queries * h.size, 0, 1, h.size);
  for (std::size_t j = 0; j < count; j += key_block)
    each_four(rows, [&](auto some, std::size_t r) HWY_ATTR {
      score_few<decltype(some)::value>(scores + r * count + j, count, q + r * width, width,
                                       h.k + (begin + j) * h.k_stride, h.k_stride,
                                       std::min(key_block, count - j), r ? 0 : count - j, h.size, h.scale);
    });
  for (std::size_t r = 0; r < rows; ++r) {
    // As indices of scores; the row of a query without a key is empty.
    const std::size_t i = r % h.queries, first = std::min(h.visible.begin(i) - begin, count);
    const std::size_t past = std::max(first, std::max(h.visible.end(i), begin) - begin);
    float* const row = scores + r * count;
    float total = 0, row_max = no_score;
    if (first < past) {
      row_max = largest(row + first, past - first);
      total = exponentials(row + first, past - first, row_max);
      if (h.dropout.active())  // decisions of all rows follow each other
        drop(row + first, row + first, past - first, h.decision(r, begin + first), h.dropout);
    }
    std::fill(row, row + first, 0.0f);
    std::fill(row + past, row + count, 0.0f);
    h.log_sum[r] = static_cast<float>(row_max + std::log(static_cast<double>(total)));
    const float factor = total == 0 ? 0 : 1 / total;
    multiply_row(row, count, factor);
  }
  for (std::size_t j = 0; j < count; j += key_block)
    each_four(rows, [&](auto some, std::size_t r) HWY_ATTR {
      mix_few<decltype(some)::value>(mixed + r * width, width, scores + r * count + j, count,
                                     h.v + (begin + j) * h.v_stride, h.v_stride,
                                     std::min(key_block, count - j), r ? 0 : count - j, h.size);
    });
  for (std::size_t r = 0; r < rows; ++r)
    convert_rows(out + r % h.queries * h.out_stride + r / h.queries * h.size, 0, mixed + r * width, 0, 1,
                 h.size);
}

void attend_few_f32(const Heads& h, float* out, float* memory) { attend_few_as(h, out, memory); }
void attend_few_bf16(const HeadsOf<bf16>& h, bf16* out, float* memory) { attend_few_as(h, out, memory); }
void attend_few_f16(const HeadsOf<f16>& h, f16* out, float* memory) { attend_few_as(h, out, memory); }

}  // namespace HWY_NAMESPACE
}  // namespace rz
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace rz {

HWY_EXPORT(attend_few_f32);
HWY_EXPORT(attend_few_bf16);
HWY_EXPORT(attend_few_f16);

namespace kernels {

void attend_few(const HeadsOf<float>& h, float* out, float* memory) {
  HWY_DYNAMIC_DISPATCH(attend_few_f32)(h, out, memory);
}
void attend_few(const HeadsOf<bf16>& h, bf16* out, float* memory) {
  HWY_DYNAMIC_DISPATCH(attend_few_bf16)(h, out, memory);
}
void attend_few(const HeadsOf<f16>& h, f16* out, float* memory) {
  HWY_DYNAMIC_DISPATCH(attend_few_f16)(h, out, memory);
}

}  // namespace kernels
}  // namespace rz
#endif
