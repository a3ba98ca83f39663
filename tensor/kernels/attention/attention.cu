// Attention in f32 arithmetic, for every dtype and head size. A warp holds a few rows while tiles of 32 other
// rows stream by, one per lane. Forward and d_q hold queries and stream keys; d_k and d_v hold keys and
// stream queries, those of one query head of the group after those of another. Each gradient is therefore
// summed by one block, in the order of heads and tokens. Scores stay in registers
// and one tile of shared memory. Forward keeps a running maximum and sum per query (Milakov and Gimelshein,
// arXiv:1805.02867; Dao et al., arXiv:2205.14135); backward recomputes the probabilities from log_sum.
// attention_mma.cu replaces these kernels where tensor cores support the call, attention_few.cu forward of a
// few queries.

#include <algorithm>
#include <bit>
#include <cmath>

#include "comm/core/math.h"
#include "comm/device/launch.h"
#include "tensor/kernels/attention/attention_device.h"
#include "tensor/kernels/check.h"
#include "tensor/kernels/device_ops.h"
#include "tensor/kernels/dtype_dispatch.h"
#include "tensor/kernels/vector_load.h"

namespace rz::kernels {

namespace {

constexpr unsigned warps = 8, streamed = 32, all_lanes = 0xffffffffu;

struct alignas(16) Four {
  float values[4];
};

/// Rows are zero-padded to a multiple of four channels, with a pitch that avoids bank conflicts.
RZ_HOST_DEVICE constexpr unsigned padded(std::size_t size) {
  return (static_cast<unsigned>(size) + 3) / 4 * 4;
}
RZ_HOST_DEVICE constexpr unsigned pitch_of(std::size_t size) { return padded(size) + 4; }

/// Indices of the calling thread.
__device__ unsigned warp() { return threadIdx.x / 32; }
__device__ unsigned lane() { return threadIdx.x % 32; }

/// Loads rows first … first + count - 1 of a head, `stride` apart, into shared memory; zeros from row `end`
/// on.
template <class T>
__device__ void load_rows(float* to, unsigned count, const T* from, std::size_t stride, std::size_t first,
                          std::size_t end, const AttentionShape& s) {
  const unsigned width = padded(s.size), pitch = pitch_of(s.size);
  for (unsigned row = warp(); row < count; row += warps)
    for (unsigned d = lane(); d < width; d += 32)
      to[row * pitch + d] = first + row < end && d < s.size ? to_f32(from[(first + row) * stride + d]) : 0.0f;
}

/// products[r] = row r · the lane's streamed row
template <int R>
__device__ void multiply_rows(float (&products)[R], const float* rows, const float* of_lane, unsigned width,
                              unsigned pitch) {
  for (int r = 0; r < R; ++r) products[r] = 0;
  for (unsigned d = 0; d < width; d += 4) {
    const Four b = *reinterpret_cast<const Four*>(of_lane + d);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const Four a = *reinterpret_cast<const Four*>(rows + static_cast<unsigned>(r) * pitch + d);
      for (int i = 0; i < 4; ++i) products[r] += a.values[i] * b.values[i];
    }
  }
}

/// sums[r][c] += row r's weights · channel (lane + 32 c) of the streamed rows
template <int R, int C>
__device__ void mix(float (&sums)[R][C], const float* weights, const float* rows, unsigned width,
                    unsigned pitch) {
  for (unsigned j = 0; j < streamed; j += 4) {
    float x[4][C];
    for (unsigned i = 0; i < 4; ++i)
      for (unsigned c = 0; c < C; ++c)
        x[i][c] = lane() + 32 * c < width ? rows[(j + i) * pitch + lane() + 32 * c] : 0.0f;
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const Four w = *reinterpret_cast<const Four*>(weights + static_cast<unsigned>(r) * streamed + j);
      for (int i = 0; i < 4; ++i)
        for (int c = 0; c < C; ++c) sums[r][c] += w.values[i] * x[i][c];
    }
  }
}

template <class T, int R, int C>
__device__ void store_rows(T* to, std::size_t stride, std::size_t first, std::size_t end,
                           const float (&values)[R][C], const AttentionShape& s) {
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) {
      const std::size_t row = first + static_cast<unsigned>(r), d = lane() + 32 * static_cast<unsigned>(c);
      if (row < end && d < s.size) to[row * stride + d] = from_f32<T>(values[r][c]);
    }
}

__device__ float largest_of_warp(float x) {
  for (int bits = 16; bits; bits >>= 1) x = fmaxf(x, __shfl_xor_sync(all_lanes, x, bits));
  return x;
}
__device__ float sum_of_warp(float x) {
  for (int bits = 16; bits; bits >>= 1) x += __shfl_xor_sync(all_lanes, x, bits);
  return x;
}

/// Applies dropout to x, the probability or gradient of key j for query i.
__device__ float drop(float x, const AttentionShape& s, std::uint64_t head, std::size_t i, std::size_t j) {
  if (s.dropout.threshold == 0) return x;
  const std::uint64_t index = head + i * s.keys + j, counter = index / 4;
  std::uint32_t words[4] = {static_cast<std::uint32_t>(counter), static_cast<std::uint32_t>(counter >> 32), 0,
                            0};
  auto key0 = static_cast<std::uint32_t>(s.dropout.seed),
       key1 = static_cast<std::uint32_t>(s.dropout.seed >> 32);
  for (int round = 0; round < Philox::rounds; ++round) {
    Philox::round(words[0], words[1], words[2], words[3], key0, key1);
    key0 += Philox::weyl0, key1 += Philox::weyl1;
  }
  const unsigned w = index % 4;  // no indexing: words stay in registers
  const std::uint32_t word = w == 0 ? words[0] : w == 1 ? words[1] : w == 2 ? words[2] : words[3];
  return word < s.dropout.threshold ? 0.0f : x * s.dropout.factor;
}

/// Running softmax of one row: the maximum and this lane's part of the sum. add() returns in `keep` the
/// factor by which earlier sums and outputs must be multiplied when the maximum grows. Hidden keys have a
/// score of -infinity.
struct RunningRow {
  float row_max = -INFINITY, sum = 0;
  __device__ float add(float score, float& keep) {
    const float now = fmaxf(row_max, largest_of_warp(score));
    keep = 1;
    if (now == -INFINITY) return 0;  // no key yet
    keep = expf(row_max - now);
    const float p = expf(score - now);
    sum = sum * keep + p;
    row_max = now;
    return p;
  }
};

/// Rows of a warp, counted from its first, that attend to a lane's token or are attended to by it.
struct SeenRows {
  int from, to;
  __device__ bool contain(int row) const { return row >= from && row < to; }
  /// The queries, from `first` on, that attend to a key if it is of the same document.
  __device__ static SeenRows queries(const VisibleKeys& visible, std::size_t key, std::size_t first,
                                     std::size_t count) {
    return between(visible.begin_query(key), visible.end_query_of_window(key, key + 1, count), first);
  }
  /// The keys, from `first` on, to which a query attends, if there is one.
  __device__ static SeenRows keys(const VisibleKeys& visible, std::size_t query, std::size_t first,
                                  std::size_t count) {
    return query < count ? between(visible.begin(query), visible.end(query), first) : SeenRows{0, 0};
  }

 private:
  __device__ static SeenRows between(std::size_t begin, std::size_t end, std::size_t first) {
    return {static_cast<int>(begin) - static_cast<int>(first),
            static_cast<int>(end) - static_cast<int>(first)};
  }
};

/// R queries per warp, C times 32 channels.
template <class T, int R, int C>
__global__ void __launch_bounds__(warps * 32, C <= 2 ? 2 : 1)
    attend(AttentionShape s, AttentionForward<T> t) {
  s.dropout.read_seed();
  constexpr unsigned rows = warps * R;
  RZ_DYNAMIC_SHARED(float, shared);
  const unsigned width = padded(s.size), pitch = pitch_of(s.size);
  float *const q = shared, *const k = q + rows * pitch, *const v = k + streamed * pitch;
  float* const weights = v + streamed * pitch + warp() * R * streamed;
  const HeadPlace head(s, blockIdx.z, blockIdx.y);
  const VisibleKeys visible = s.visible(blockIdx.z);
  // Longest rows first, since they finish last.
  const std::size_t begin = std::size_t{gridDim.x - 1 - blockIdx.x} * rows, first = begin + warp() * R;
  load_rows(q, rows, t.q.at(head.query_row, head.channel), t.q.stride, begin, s.queries, s);
  RunningRow running[R];
  float out[R][C] = {};
  const std::size_t last = visible.end(begin + rows - 1);
  for (std::size_t j = visible.begin(begin) / streamed * streamed; j < last; j += streamed) {
    __syncthreads();
    load_rows(k, streamed, t.k.at(head.key_row, head.key_channel), t.k.stride, j, visible.keys, s);
    load_rows(v, streamed, t.v.at(head.key_row, head.key_channel), t.v.stride, j, visible.keys, s);
    __syncthreads();
    float scores[R];
    multiply_rows(scores, q + warp() * R * pitch, k + lane() * pitch, width, pitch);
    const SeenRows seen = SeenRows::queries(visible, j + lane(), first, s.queries);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const std::size_t i = first + static_cast<unsigned>(r), key = j + lane();
      float keep;
      const bool is_seen = seen.contain(r) && visible.same_document(i, key);
      const float p = running[r].add(is_seen ? scores[r] * s.scale : -INFINITY, keep);
      weights[static_cast<unsigned>(r) * streamed + lane()] = drop(p, s, head.decisions, i, key);
      for (int c = 0; c < C; ++c) out[r][c] *= keep;
    }
    __syncwarp();
    mix(out, weights, v, width, pitch);
    __syncwarp();
  }
  for (int r = 0; r < R; ++r) {
    const std::size_t i = first + static_cast<unsigned>(r);
    const float total = sum_of_warp(running[r].sum);
    for (int c = 0; c < C; ++c) out[r][c] = total == 0 ? 0 : out[r][c] / total;
    if (lane() == 0 && i < s.queries) t.log_sum[head.in_log_sum + i] = running[r].row_max + logf(total);
  }
  store_rows(t.out + head.in_out, s.channels(), first, s.queries, out, s);
}

/// Computes delta; `lanes` threads, a power of two of at most a warp, per token and head.
template <class T, int width>
__global__ void multiply_outputs(float* __restrict__ delta, const T* __restrict__ out,
                                 const T* __restrict__ d_out, AttentionShape s, unsigned lanes) {
  const std::size_t n = (std::size_t{blockIdx.x} * blockDim.x + threadIdx.x) / lanes;  // of [B, T, H]
  const bool there = n < s.batch * s.queries * s.heads;
  float sum = 0;
  for (std::size_t d = threadIdx.x % lanes * width; there && d < s.size; d += lanes * width) {
    float x[width], dx[width];
    ops::load(x, out + n * s.size + d), ops::load(dx, d_out + n * s.size + d);
#pragma unroll
    for (int j = 0; j < width; ++j) sum += x[j] * dx[j];
  }
  for (unsigned bits = lanes / 2; bits > 0; bits /= 2)
    sum += __shfl_xor_sync(all_lanes, sum, static_cast<int>(bits));
  if (!there || threadIdx.x % lanes != 0) return;
  const std::size_t h = n % s.heads, token = n / s.heads, b = token / s.queries;
  delta[(b * s.heads + h) * s.queries + token % s.queries] = sum;
}

/// A probability after dropout, and the gradient of its score before multiplication by `scale`.
struct Probability {
  float dropped, d_score;
  /// For query i and key j, if it is seen, from q · k and the gradient of the dropped probability.
  __device__ Probability(bool seen, float product, float d_dropped, float log_sum, float delta, std::size_t i,
                         std::size_t j, const AttentionShape& s, std::uint64_t head) {
    const float p = seen ? expf(product * s.scale - log_sum) : 0;
    dropped = drop(p, s, head, i, j);
    d_score = p * (drop(d_dropped, s, head, i, j) - delta);
  }
};

/// d_q; R queries per warp.
template <class T, int R, int C>
__global__ void __launch_bounds__(warps * 32) attend_backward_q(AttentionShape s, AttentionBackward<T> t) {
  s.dropout.read_seed();
  constexpr unsigned rows = warps * R;
  RZ_DYNAMIC_SHARED(float, shared);
  const unsigned width = padded(s.size), pitch = pitch_of(s.size);
  float *const q = shared, *const d_out = q + rows * pitch;
  float *const k = d_out + rows * pitch, *const v = k + streamed * pitch;
  float* const weights = v + streamed * pitch + warp() * R * streamed;
  const HeadPlace head(s, blockIdx.z, blockIdx.y);
  const VisibleKeys visible = s.visible(blockIdx.z);
  const std::size_t begin = std::size_t{gridDim.x - 1 - blockIdx.x} * rows, first = begin + warp() * R;
  load_rows(q, rows, t.q.at(head.query_row, head.channel), t.q.stride, begin, s.queries, s);
  load_rows(d_out, rows, t.d_out + head.in_out, s.channels(), begin, s.queries, s);
  float d_q[R][C] = {};
  const std::size_t last = visible.end(begin + rows - 1);
  for (std::size_t j = visible.begin(begin) / streamed * streamed; j < last; j += streamed) {
    __syncthreads();
    load_rows(k, streamed, t.k.at(head.key_row, head.key_channel), t.k.stride, j, visible.keys, s);
    load_rows(v, streamed, t.v.at(head.key_row, head.key_channel), t.v.stride, j, visible.keys, s);
    __syncthreads();
    float scores[R], d_p[R];
    multiply_rows(scores, q + warp() * R * pitch, k + lane() * pitch, width, pitch);
    multiply_rows(d_p, d_out + warp() * R * pitch, v + lane() * pitch, width, pitch);
    const SeenRows seen = SeenRows::queries(visible, j + lane(), first, s.queries);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const std::size_t i = first + static_cast<unsigned>(r), of = head.in_log_sum + i;
      const bool there = i < s.queries;
      const bool is_seen = seen.contain(r) && visible.same_document(i, j + lane());
      const Probability p(is_seen, scores[r], d_p[r], there ? t.log_sum[of] : 0, there ? t.delta[of] : 0, i,
                          j + lane(), s, head.decisions);
      weights[static_cast<unsigned>(r) * streamed + lane()] = p.d_score * s.scale;
    }
    __syncwarp();
    mix(d_q, weights, k, width, pitch);
    __syncwarp();
  }
  store_rows(t.d_q.at(head.query_row, head.channel), t.d_q.stride, first, s.queries, d_q, s);
}

/// d_k and d_v; R keys per warp.
template <class T, int R, int C>
__global__ void __launch_bounds__(warps * 32) attend_backward_kv(AttentionShape s, AttentionBackward<T> t) {
  s.dropout.read_seed();
  constexpr unsigned rows = warps * R;
  RZ_DYNAMIC_SHARED(float, shared);
  const unsigned width = padded(s.size), pitch = pitch_of(s.size);
  float *const k = shared, *const v = k + rows * pitch;
  float *const q = v + rows * pitch, *const d_out = q + streamed * pitch;
  float* const weights = d_out + streamed * pitch + warp() * R * streamed;
  float* const d_scores = weights + rows * streamed;
  const VisibleKeys visible = s.visible(blockIdx.z);
  const HeadPlace keys(s, blockIdx.z, blockIdx.y * s.group);
  const std::size_t begin = std::size_t{blockIdx.x} * rows, first = begin + warp() * R;
  load_rows(k, rows, t.k.at(keys.key_row, keys.key_channel), t.k.stride, begin, visible.keys, s);
  load_rows(v, rows, t.v.at(keys.key_row, keys.key_channel), t.v.stride, begin, visible.keys, s);
  float d_k[R][C] = {}, d_v[R][C] = {};
  const std::size_t end = visible.end_query(begin, begin + rows, s.queries);
  for (std::size_t h = blockIdx.y * s.group; h < (blockIdx.y + 1) * s.group; ++h) {
    const HeadPlace head(s, blockIdx.z, h);
    for (std::size_t i = visible.begin_query(begin); i < end; i += streamed) {
      __syncthreads();
      load_rows(q, streamed, t.q.at(head.query_row, head.channel), t.q.stride, i, s.queries, s);
      load_rows(d_out, streamed, t.d_out + head.in_out, s.channels(), i, s.queries, s);
      __syncthreads();
      const std::size_t query = i + lane();
      const float log_sum = query < s.queries ? t.log_sum[head.in_log_sum + query] : 0;
      const float delta = query < s.queries ? t.delta[head.in_log_sum + query] : 0;
      float scores[R], d_p[R];
      multiply_rows(scores, k + warp() * R * pitch, q + lane() * pitch, width, pitch);
      multiply_rows(d_p, v + warp() * R * pitch, d_out + lane() * pitch, width, pitch);
      const SeenRows seen = SeenRows::keys(visible, query, first, s.queries);
#pragma unroll
      for (int r = 0; r < R; ++r) {
        const auto row = static_cast<unsigned>(r);
        const Probability p(seen.contain(r), scores[r], d_p[r], log_sum, delta, query, first + row, s,
                            head.decisions);
        weights[row * streamed + lane()] = p.dropped;
        d_scores[row * streamed + lane()] = p.d_score * s.scale;
      }
      __syncwarp();
      mix(d_v, weights, d_out, width, pitch);
      mix(d_k, d_scores, q, width, pitch);
      __syncwarp();
    }
  }
  store_rows(t.d_k.at(keys.key_row, keys.key_channel), t.d_k.stride, first, s.rows, d_k, s);
  store_rows(t.d_v.at(keys.key_row, keys.key_channel), t.d_v.stride, first, s.rows, d_v, s);
}

// ---- launching

/// Calls f<R, C>() with as many rows per warp as registers and shared memory permit.
template <class F>
void with_sizes(std::size_t size, const F& f) {
  if (size <= 32) return f.template operator()<8, 1>();
  if (size <= 64) return f.template operator()<8, 2>();
  if (size <= 128) return f.template operator()<8, 4>();
  f.template operator()<4, 8>();
}

/// Launches a kernel that holds `tokens` rows of `heads` heads, and whose shared memory has `held` sets of
/// rows_of_warp rows per warp, `tiles` tiles of weights, and two streamed tiles.
template <class... P, class... A>
void launch(const char* name, void (*kernel)(P...), const AttentionShape& s, std::size_t tokens,
            std::size_t heads, unsigned rows_of_warp, unsigned held, unsigned tiles, const Stream& stream,
            const A&... args) {
  const unsigned rows = warps * rows_of_warp;
  const std::size_t shared = sizeof(float) * (std::size_t{held * rows + 2 * streamed} * pitch_of(s.size) +
                                              std::size_t{tiles} * rows * streamed);
  const cuda::Grid grid{{static_cast<unsigned>((tokens + rows - 1) / rows), static_cast<unsigned>(heads),
                         static_cast<unsigned>(s.batch)},
                        {warps * 32},
                        shared};
  if (shared > 48 << 10) {
    const cuda::DeviceGuard guard(stream.device());
    cuda::check(cuda::runtime().allow_shared_bytes(reinterpret_cast<const void*>(kernel), shared), name,
                stream.device());
  }
  cuda::launch(name, kernel, grid, stream, args...);
}

template <class T>
void forward(const AttentionShape& s, const AttentionForward<T>& t, const Stream& stream) {
  if (are_few_queries(s)) return attend_few_queries(s, t, stream);
  if constexpr (sizeof(T) == 2)
    if (fits_tensor_cores(s) && fits_tensor_cores(t.q) && fits_tensor_cores(t.k) && fits_tensor_cores(t.v) &&
        fits_tensor_cores(StridedRows<T>{t.out, s.channels()}))
      return attend_on_tensor_cores(s, t, stream);
  with_sizes(s.size, [&]<int R, int C>() {
    launch("attention", attend<T, R, C>, s, s.queries, s.heads, R, 1, 1, stream, s, t);
  });
}

template <class T>
void backward(const AttentionShape& s, const AttentionBackward<T>& t, const Stream& stream) {
  if constexpr (sizeof(T) == 2)
    if (fits_tensor_cores(s) && fits_tensor_cores(t.q) && fits_tensor_cores(t.k) && fits_tensor_cores(t.v) &&
        fits_tensor_cores(t.d_q) && fits_tensor_cores(t.d_k) && fits_tensor_cores(t.d_v) &&
        fits_tensor_cores(StridedRows<const T>{t.d_out, s.channels()}))
      return attend_backward_on_tensor_cores(s, t, stream);
  with_sizes(s.size, [&]<int R, int C>() {
    launch("attention_backward_q", attend_backward_q<T, R, C>, s, s.queries, s.heads, R, 2, 1, stream, s, t);
    launch("attention_backward_kv", attend_backward_kv<T, R, C>, s, s.rows, s.kv_heads(), R, 2, 2, stream, s,
           t);
  });
}

template <class T>
float* output_products(const AttentionShape& s, const T* out, const T* d_out, const Stream& stream) {
  const std::size_t rows = s.batch * s.heads * s.queries;
  auto* const delta = static_cast<float*>(stream.workspace(rows * sizeof(float)));
  constexpr int width = ops::pack_width<T>;
  const bool packs = ops::rows_are_packs(s.size, out, d_out);
  const auto loads = static_cast<unsigned>(packs ? s.size / width : s.size);
  const unsigned lanes = std::min(32u, std::bit_ceil(loads));
  cuda::launch("multiply_outputs", packs ? multiply_outputs<T, width> : multiply_outputs<T, 1>,
               cuda::grid_for(rows * lanes, 256, ~std::size_t{0}), stream, delta, out, d_out, s, lanes);
  return delta;
}

}  // namespace

}  // namespace rz::kernels

namespace rz::ops::device {

namespace {

using kernels::AttentionShape;
using kernels::StridedRows;

AttentionShape shape_of(const char* op, const Tensor& q, const Tensor& k, const AttentionOptions& o,
                        const DropoutMask& mask) {
  const auto heads = static_cast<std::size_t>(o.heads),
             kv_heads = static_cast<std::size_t>(o.kv_heads ? o.kv_heads : o.heads);
  const std::size_t size = last(q) / heads, rows = k.shape()[1];
  if (size > 256) fail(Errc::unsupported, op, ": heads of ", size, " channels; at most 256 on a device");
  return {q.shape()[0],
          q.shape()[1],
          o.keys ? o.keys : rows,
          rows,
          heads,
          heads / kv_heads,
          size,
          o.scale != 0 ? o.scale : static_cast<float>(1 / std::sqrt(static_cast<double>(size))),
          o.causal,
          o.past,
          o.window ? o.window : ~std::size_t{0},
          o.key_counts.defined() ? o.key_counts.data<std::int32_t>() : nullptr,
          o.document_starts.defined() ? o.document_starts.data<std::int32_t>() : nullptr,
          kernels::dropout_params(op, mask)};
}

template <class T>
StridedRows<T> rows_of(const Tensor& t) {
  return {t.data<std::remove_const_t<T>>(), t.row_stride()};
}

}  // namespace

void attention(const Tensor& out, const Tensor& log_sum, const Tensor& q, const Tensor& k, const Tensor& v,
               const AttentionOptions& options, const DropoutMask& mask, const Stream& stream) {
  const AttentionShape s = shape_of("attention", q, k, options, mask);
  dispatch_dtype(q.dtype(), [&](auto t) {
    using T = decltype(t);
    kernels::forward<T>(
        s,
        {out.data<T>(), log_sum.data<float>(), rows_of<const T>(q), rows_of<const T>(k), rows_of<const T>(v)},
        stream);
  });
}

void attention_backward(const Tensor& d_q, const Tensor& d_k, const Tensor& d_v, const Tensor& d_out,
                        const Tensor& out, const Tensor& log_sum, const Tensor& q, const Tensor& k,
                        const Tensor& v, const AttentionOptions& options, const DropoutMask& mask,
                        const Stream& stream) {
  const AttentionShape s = shape_of("attention_backward", q, k, options, mask);
  dispatch_dtype(q.dtype(), [&](auto t) {
    using T = decltype(t);
    const float* delta = kernels::output_products(s, out.data<T>(), d_out.data<T>(), stream);
    kernels::backward<T>(
        s,
        {rows_of<T>(d_q), rows_of<T>(d_k), rows_of<T>(d_v), d_out.data<T>(), rows_of<const T>(q),
         rows_of<const T>(k), rows_of<const T>(v), log_sum.data<float>(), delta},
        stream);
  });
}

}  // namespace rz::ops::device
