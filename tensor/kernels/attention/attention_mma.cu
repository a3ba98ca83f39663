// Attention of f16 and bf16 on tensor cores (after Dao, arXiv:2307.08691), for heads of 64 or 128 channels
// without dropout, with as many keys as queries. As in attention.cu, some rows are held while tiles of N
// other rows stream by, here through two stages of shared memory: the next tile is copied during the
// computation on the current one. A warp owns 16·M of the held rows; probabilities pass from its registers
// directly into the next product. Scores are scaled by log2(e), since the hardware computes 2^x.
//
// Kernels are compiled with and without documents (AttentionOptions::document_starts), whose keys need
// registers of their own.

#include <cmath>

#include "comm/device/launch.h"
#include "tensor/kernels/attention/attention_device.h"
#include "tensor/kernels/attention/tensor_cores.h"

namespace rz::kernels {

namespace {

constexpr int warps = 4;
constexpr float log2_e = 1.4426950408889634f;
using Bytes = unsigned char;

// ---- tiles in shared memory

/// Rows of D elements in 16-byte chunks, swizzled so that the chunks of eight rows in one column are in
/// different banks.
template <int D>
struct Tile {
  static constexpr unsigned row_bytes = 2 * D, chunks = D / 8;
  __device__ static unsigned at(unsigned row, unsigned chunk) {
    return row * row_bytes + (chunk ^ (row & 7)) * 16;
  }
};

/// Starts to copy rows first … first + rows - 1, `stride` apart; zeros beyond the last token.
template <int D, int rows, class T>
__device__ void copy_rows(AsyncCopies& copies, Bytes* to, const T* from, std::size_t stride, unsigned first,
                          unsigned tokens) {
  constexpr unsigned chunks = Tile<D>::chunks;
#pragma unroll
  for (unsigned e = threadIdx.x; e < rows * chunks; e += warps * 32) {
    const unsigned row = e / chunks, chunk = e % chunks;
    const bool valid = first + row < tokens;
    copies.copy(to + Tile<D>::at(row, chunk),
                valid ? from + std::size_t{first + row} * stride + chunk * 8 : from, valid);
  }
}

/// Loads b-fragments of 16 columns; a column of b is a row of the tile: rows from `row`, 16 channels.
template <int D>
__device__ void load_rows_as_columns(std::uint32_t (&to)[4], const Bytes* tile, unsigned row, unsigned step) {
  const unsigned lane = threadIdx.x % 32;
  load_matrices(to, tile + Tile<D>::at(row + lane % 8 + lane / 16 * 8, 2 * step + lane / 8 % 2));
}
/// Loads b-fragments where b is the tile itself: 16 rows from `row`, channels from 16 · step.
template <int D>
__device__ void load_rows_as_rows(std::uint32_t (&to)[4], const Bytes* tile, unsigned row, unsigned step) {
  const unsigned lane = threadIdx.x % 32;
  load_matrices_transposed(to, tile + Tile<D>::at(row + lane % 16, 2 * step + lane / 16));
}

/// The a-fragments of the warp's 16·M rows: `kept` in registers after keep(), otherwise loaded at each use.
template <int D, int M, bool kept>
class HeldRows {
 public:
  __device__ explicit HeldRows(const Bytes* tile) : tile_(tile) {}
  __device__ void keep() {
    if constexpr (kept)
      for (int m = 0; m < M; ++m)
        for (int step = 0; step < D / 16; ++step) load(all_[m][step], m, step);
  }
  __device__ void get(std::uint32_t (&to)[4], int m, int step) const {
    if constexpr (kept)
      for (int i = 0; i < 4; ++i) to[i] = all_[m][step][i];
    else
      load(to, m, step);
  }

 private:
  __device__ void load(std::uint32_t (&to)[4], int m, int step) const {
    const unsigned lane = threadIdx.x % 32, row = (threadIdx.x / 32 * M + static_cast<unsigned>(m)) * 16;
    load_matrices(to, tile_ + Tile<D>::at(row + lane % 16, 2 * static_cast<unsigned>(step) + lane / 16));
  }
  const Bytes* tile_;
  std::uint32_t all_[kept ? M : 1][kept ? D / 16 : 1][4];
};

// ---- products

/// Accumulators of 16·M rows and `columns` columns.
template <int M, int columns>
using Sums = float[M][columns / 8][4];

template <int M, int C>
__device__ void clear(float (&sums)[M][C][4]) {
  for (int m = 0; m < M; ++m)
    for (int c = 0; c < C; ++c)
      for (int i = 0; i < 4; ++i) sums[m][c][i] = 0;
}

/// products[16 M, N] = held rows · rows of the tile
template <class T, int D, int M, int C, bool kept>
__device__ void multiply_rows(float (&products)[M][C][4], const HeldRows<D, M, kept>& held,
                              const Bytes* tile) {
  clear(products);
#pragma unroll
  for (int step = 0; step < D / 16; ++step) {
    std::uint32_t a[M][4];
    for (int m = 0; m < M; ++m) held.get(a[m], m, step);
#pragma unroll
    for (int c = 0; c < C; c += 2) {
      std::uint32_t b[4];
      load_rows_as_columns<D>(b, tile, static_cast<unsigned>(c) * 8, static_cast<unsigned>(step));
#pragma unroll
      for (int m = 0; m < M; ++m) {
        multiply_add<T>(products[m][c], a[m], b[0], b[1]);
        multiply_add<T>(products[m][c + 1], a[m], b[2], b[3]);
      }
    }
  }
}

/// sums[16 M, D] += weights (rounded to T) · tile. The c-fragments of a lane have the layout of its
/// a-fragments.
template <class T, int D, int M, int C>
__device__ void mix(float (&sums)[M][D / 8][4], const float (&weights)[M][C][4], const Bytes* tile) {
#pragma unroll
  for (int step = 0; step < C / 2; ++step) {
    std::uint32_t a[M][4];
#pragma unroll
    for (int m = 0; m < M; ++m)
      for (int i = 0; i < 4; ++i) {
        const float* const pair = &weights[m][2 * step + i / 2][i % 2 * 2];
        a[m][i] = pack<T>(pair[0], pair[1]);
      }
#pragma unroll
    for (int d = 0; d < D / 16; ++d) {
      std::uint32_t b[4];
      load_rows_as_rows<D>(b, tile, static_cast<unsigned>(step) * 16, static_cast<unsigned>(d));
#pragma unroll
      for (int m = 0; m < M; ++m) {
        multiply_add<T>(sums[m][2 * d], a[m], b[0], b[1]);
        multiply_add<T>(sums[m][2 * d + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// ---- where a lane's elements are

/// For rows that begin at `begin`: the first of the two rows of fragment m in which this lane has elements.
/// The second is 8 rows further.
template <int M>
__device__ unsigned row_of_lane(unsigned begin, int m) {
  return begin + (threadIdx.x / 32 * M + static_cast<unsigned>(m)) * 16 + threadIdx.x % 32 / 4;
}
/// The first of this lane's two columns in fragment c.
__device__ unsigned column_of_lane(int c) { return static_cast<unsigned>(c) * 8 + threadIdx.x % 4 * 2; }

__device__ float largest_of_four(float x) {
  x = fmaxf(x, __shfl_xor_sync(whole_warp, x, 1));
  return fmaxf(x, __shfl_xor_sync(whole_warp, x, 2));
}
__device__ float sum_of_four(float x) {
  x += __shfl_xor_sync(whole_warp, x, 1);
  return x + __shfl_xor_sync(whole_warp, x, 2);
}

template <class T, int M, int C>
__device__ void store_rows(T* to, std::size_t stride, unsigned begin, unsigned tokens,
                           const float (&values)[M][C][4], const float (&factors)[M][2]) {
  for (int m = 0; m < M; ++m)
    for (int half = 0; half < 2; ++half) {
      const unsigned row = row_of_lane<M>(begin, m) + 8 * static_cast<unsigned>(half);
      if (row >= tokens) continue;
      for (int c = 0; c < C; ++c) {
        const float* const pair = &values[m][c][2 * half];
        *reinterpret_cast<std::uint32_t*>(to + std::size_t{row} * stride + column_of_lane(c)) =
            pack<T>(pair[0] * factors[m][half], pair[1] * factors[m][half]);
      }
    }
}

// ---- forward

/// Running softmax of the rows of a lane's fragments: the maximum and this lane's part of the sum.
template <int M>
struct RunningRows {
  float row_max[M][2], sum[M][2];
  __device__ RunningRows() {
    for (int m = 0; m < M; ++m)
      for (int half = 0; half < 2; ++half) row_max[m][half] = -INFINITY, sum[m][half] = 0;
  }
};

/// Replaces scores by e^(score - row_max), and rescales earlier sums and outputs to the new maximum. With
/// documents a row may have no key yet.
template <bool documents, int M, int C, int O>
__device__ void soften(float (&scores)[M][C][4], RunningRows<M>& rows, float (&out)[M][O][4], float scale) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float row_max = rows.row_max[m][half];
      for (int c = 0; c < C; ++c)
        row_max = fmaxf(row_max, fmaxf(scores[m][c][2 * half], scores[m][c][2 * half + 1]));
      row_max = largest_of_four(row_max);
      const float base = documents && row_max == -INFINITY ? 0 : row_max;
      const float keep = power_of_2((rows.row_max[m][half] - base) * scale), shift = base * scale;
      float sum = rows.sum[m][half] * keep;
      for (int c = 0; c < C; ++c)
        for (int i = 2 * half; i < 2 * half + 2; ++i)
          sum += scores[m][c][i] = power_of_2(fmaf(scores[m][c][i], scale, -shift));
      rows.sum[m][half] = sum;
      rows.row_max[m][half] = row_max;
      for (int o = 0; o < O; ++o)
        for (int i = 2 * half; i < 2 * half + 2; ++i) out[m][o][i] *= keep;
    }
}

/// Sets the scores of keys after their query to -infinity.
template <int M, int C>
__device__ void hide_later_keys(float (&scores)[M][C][4], unsigned begin, unsigned key) {
  for (int m = 0; m < M; ++m) {
    const unsigned query = row_of_lane<M>(begin, m);
    for (int c = 0; c < C; ++c)
      for (int i = 0; i < 4; ++i)
        if (key + column_of_lane(c) + static_cast<unsigned>(i % 2) > query + static_cast<unsigned>(i / 2 * 8))
          scores[m][c][i] = -INFINITY;
  }
}

/// Sets the scores of keys beyond the last token to -infinity.
template <int M, int C>
__device__ void hide_keys_from(float (&scores)[M][C][4], unsigned tokens, unsigned key) {
  for (int m = 0; m < M; ++m)
    for (int c = 0; c < C; ++c)
      for (int i = 0; i < 4; ++i)
        if (key + column_of_lane(c) + static_cast<unsigned>(i % 2) >= tokens) scores[m][c][i] = -INFINITY;
}

/// Hides what the queries from `first` on, in rows from `begin` on, do not attend to in the N keys from `key`
/// on.
template <int N, int M, int C>
__device__ void hide_keys(float (&scores)[M][C][4], bool causal, unsigned begin, unsigned first, unsigned key,
                          unsigned tokens) {
  if (causal) {
    if (key + N > first + 1) hide_later_keys(scores, begin, key);
  } else if (key + N > tokens) {
    hide_keys_from(scores, tokens, key);
  }
}

/// Where the documents of the queries of a warp begin.
template <int M>
class Documents {
 public:
  /// The rows of fragments belong to queries from `begin` on. With no documents nothing is read.
  __device__ Documents(const VisibleKeys& visible, unsigned begin, unsigned tokens) {
    if (!visible.document_starts) return;
    const unsigned first = begin + threadIdx.x / 32 * (16 * M);
    first_ = at(visible, first, tokens), last_ = at(visible, first + 16 * M - 1, tokens);
    for (int m = 0; m < M; ++m)
      for (int half = 0; half < 2; ++half)
        of_rows_[m][half] = at(visible, row_of_lane<M>(begin, m) + 8 * static_cast<unsigned>(half), tokens);
  }
  /// That of a query, or of the last one.
  __device__ static unsigned at(const VisibleKeys& visible, unsigned query, unsigned tokens) {
    return static_cast<unsigned>(visible.document_start(query < tokens ? query : tokens - 1));
  }
  /// The first that the warp needs.
  __device__ unsigned first() const { return first_; }
  /// Sets the scores of keys of earlier documents to -infinity.
  template <int C>
  __device__ void hide_earlier_keys(float (&scores)[M][C][4], unsigned key) const {
    if (key >= last_) return;
    for (int m = 0; m < M; ++m)
      for (int c = 0; c < C; ++c)
        for (int i = 0; i < 4; ++i)
          if (key + column_of_lane(c) + static_cast<unsigned>(i % 2) < of_rows_[m][i / 2])
            scores[m][c][i] = -INFINITY;
  }

 private:
  unsigned first_ = 0, last_ = 0, of_rows_[M][2] = {};
};

template <int D, int M, int N>
struct Forward {
  static constexpr int rows = warps * M * 16;
  static constexpr std::size_t held_bytes = 2 * rows * D, tile_bytes = 2 * N * D;
  static constexpr std::size_t shared_bytes = held_bytes + 4 * tile_bytes;
};

template <class T, int D, int M, int N, bool documents>
__global__ void __launch_bounds__(warps * 32, 2) attend(AttentionShape s, AttentionForward<T> t) {
  using F = Forward<D, M, N>;
  RZ_DYNAMIC_SHARED(Bytes, shared);
  Bytes* const tiles = shared + F::held_bytes;
  const HeadPlace head(s, blockIdx.y, blockIdx.x);
  const T* const q_rows = t.q.at(head.query_row, head.channel);
  const T* const k_rows = t.k.at(head.key_row, head.key_channel);
  const T* const v_rows = t.v.at(head.key_row, head.key_channel);
  // Longest rows first, since they finish last.
  const auto tokens = static_cast<unsigned>(s.queries);
  const unsigned begin = (gridDim.z - 1 - blockIdx.z) * F::rows;
  const unsigned end = s.causal && begin + F::rows < tokens ? begin + F::rows : tokens;
  const unsigned first = begin + threadIdx.x / 32 * (16 * M);  // first row of the warp
  const VisibleKeys visible = s.visible(blockIdx.y);
  const unsigned start = documents ? Documents<M>::at(visible, begin, tokens) / N * N : 0;
  AsyncCopies copies;
  const auto copy_tile = [&](unsigned key, unsigned stage) {
    Bytes* const to = tiles + stage * 2 * F::tile_bytes;
    copy_rows<D, N>(copies, to, k_rows, t.k.stride, key, tokens);
    copy_rows<D, N>(copies, to + F::tile_bytes, v_rows, t.v.stride, key, tokens);
    copies.end_group();
  };
  copy_rows<D, F::rows>(copies, shared, q_rows, t.q.stride, begin, tokens);
  copy_tile(start, 0);

  HeldRows<D, M, true> q(shared);
  const Documents<M> of_rows(visible, begin, tokens);
  RunningRows<M> rows;
  Sums<M, D> out;
  clear(out);
  unsigned stage = 0;
  for (unsigned key = start; key < end; key += N, stage ^= 1) {
    copies.template wait<0>();
    __syncthreads();  // the tile has arrived, and all warps have finished the previous one
    if (key == start) q.keep();
    if (key + N < end) copy_tile(key + N, stage ^ 1);
    if (s.causal && key >= first + 16 * M) continue;  // only other warps have queries after these keys
    if (documents && key + N <= of_rows.first()) continue;
    const Bytes* const k = tiles + stage * 2 * F::tile_bytes;
    Sums<M, N> scores;
    multiply_rows<T>(scores, q, k);
    hide_keys<N>(scores, s.causal, begin, first, key, tokens);
    if constexpr (documents) of_rows.hide_earlier_keys(scores, key);
    soften<documents>(scores, rows, out, s.scale * log2_e);
    mix<T, D>(out, scores, k + F::tile_bytes);
  }
  float factors[M][2];
  for (int m = 0; m < M; ++m)
    for (int half = 0; half < 2; ++half) {
      const float total = sum_of_four(rows.sum[m][half]);
      factors[m][half] = 1 / total;
      const unsigned row = row_of_lane<M>(begin, m) + 8 * static_cast<unsigned>(half);
      if (threadIdx.x % 4 == 0 && row < tokens)
        t.log_sum[head.in_log_sum + row] = rows.row_max[m][half] * s.scale + logf(total);
    }
  store_rows(t.out + head.in_out, s.channels(), begin, tokens, out, factors);
}

// ---- backward

template <int D, int M, int N>
struct Backward {
  static constexpr int rows = warps * M * 16;
  static constexpr std::size_t held_bytes = 2 * rows * D, tile_bytes = 2 * N * D;
  /// Two sets of held rows; two stages of two tiles and of two numbers per tile row.
  static constexpr std::size_t shared_bytes = 2 * held_bytes + 4 * tile_bytes + 4 * N * sizeof(float);
};

/// d_q. Held rows: q and d_out; tiles: k and v.
template <class T, int D, int M, int N, bool documents>
__global__ void __launch_bounds__(warps * 32, 2) attend_backward_q(AttentionShape s, AttentionBackward<T> t) {
  using B = Backward<D, M, N>;
  RZ_DYNAMIC_SHARED(Bytes, shared);
  Bytes* const tiles = shared + 2 * B::held_bytes;
  const HeadPlace head(s, blockIdx.y, blockIdx.x);
  const T* const k_rows = t.k.at(head.key_row, head.key_channel);
  const T* const v_rows = t.v.at(head.key_row, head.key_channel);
  const auto tokens = static_cast<unsigned>(s.queries);
  const unsigned begin = (gridDim.z - 1 - blockIdx.z) * B::rows;
  const unsigned end = s.causal && begin + B::rows < tokens ? begin + B::rows : tokens;
  const unsigned first = begin + threadIdx.x / 32 * (16 * M);
  const VisibleKeys visible = s.visible(blockIdx.y);
  const unsigned start = documents ? Documents<M>::at(visible, begin, tokens) / N * N : 0;
  AsyncCopies copies;
  const auto copy_tile = [&](unsigned key, unsigned stage) {
    Bytes* const to = tiles + stage * 2 * B::tile_bytes;
    copy_rows<D, N>(copies, to, k_rows, t.k.stride, key, tokens);
    copy_rows<D, N>(copies, to + B::tile_bytes, v_rows, t.v.stride, key, tokens);
    copies.end_group();
  };
  copy_rows<D, B::rows>(copies, shared, t.q.at(head.query_row, head.channel), t.q.stride, begin, tokens);
  copy_rows<D, B::rows>(copies, shared + B::held_bytes, t.d_out + head.in_out, s.channels(), begin, tokens);
  copy_tile(start, 0);

  float log_sum[M][2], delta[M][2], factors[M][2];
  for (int m = 0; m < M; ++m)
    for (int half = 0; half < 2; ++half) {
      const unsigned row = row_of_lane<M>(begin, m) + 8 * static_cast<unsigned>(half);
      const bool there = row < tokens;
      log_sum[m][half] = there ? t.log_sum[head.in_log_sum + row] * log2_e : 0;
      delta[m][half] = there ? t.delta[head.in_log_sum + row] : 0;
      factors[m][half] = s.scale;
    }
  HeldRows<D, M, true> q(shared), d_out(shared + B::held_bytes);
  const Documents<M> of_rows(visible, begin, tokens);
  Sums<M, D> d_q;
  clear(d_q);
  unsigned stage = 0;
  for (unsigned key = start; key < end; key += N, stage ^= 1) {
    copies.template wait<0>();
    __syncthreads();
    if (key == start) q.keep(), d_out.keep();
    if (key + N < end) copy_tile(key + N, stage ^ 1);
    if (s.causal && key >= first + 16 * M) continue;
    if (documents && key + N <= of_rows.first()) continue;
    const Bytes *const k = tiles + stage * 2 * B::tile_bytes, *const v = k + B::tile_bytes;
    Sums<M, N> scores, d_p;
    multiply_rows<T>(scores, q, k);
    hide_keys<N>(scores, s.causal, begin, first, key, tokens);
    if constexpr (documents) of_rows.hide_earlier_keys(scores, key);
    multiply_rows<T>(d_p, d_out, v);
#pragma unroll
    for (int m = 0; m < M; ++m)
      for (int c = 0; c < N / 8; ++c)
        for (int i = 0; i < 4; ++i) {
          const float p = power_of_2(fmaf(scores[m][c][i], s.scale * log2_e, -log_sum[m][i / 2]));
          scores[m][c][i] = p * (d_p[m][c][i] - delta[m][i / 2]);
        }
    mix<T, D>(d_q, scores, k);
  }
  store_rows(t.d_q.at(head.query_row, head.channel), t.d_q.stride, begin, tokens, d_q, factors);
}

/// log_sum and delta of a tile's queries on their way to shared memory: read when the tile's copy starts,
/// stored when the previous tile is finished.
struct QueryNumbers {
  float log_sum = 0, delta = 0;
  __device__ void read(const float* log_sums, const float* deltas, unsigned query, unsigned tokens) {
    const bool there = query < tokens;
    log_sum = there ? log_sums[query] * log2_e : INFINITY;  // beyond the last token: probabilities become 0
    delta = there ? deltas[query] : 0;
  }
};

/// d_k and d_v. Held rows: k and v; tiles: q and d_out, of one query head of the group after the other.
/// Scores are transposed: each row belongs to a key.
template <class T, int D, int M, int N, bool documents>
__global__ void __launch_bounds__(warps * 32, 2)
    attend_backward_kv(AttentionShape s, AttentionBackward<T> t) {
  using B = Backward<D, M, N>;
  RZ_DYNAMIC_SHARED(Bytes, shared);
  Bytes* const tiles = shared + 2 * B::held_bytes;
  auto* const numbers = reinterpret_cast<float*>(tiles + 4 * B::tile_bytes);  // [stage][log_sum, delta][N]
  const auto group = static_cast<unsigned>(s.group), tokens = static_cast<unsigned>(s.queries);
  const HeadPlace head(s, blockIdx.y, blockIdx.x * group);  // the first of the group
  const T* const q_rows = t.q.at(head.query_row, head.channel);
  const VisibleKeys visible = s.visible(blockIdx.y);
  const unsigned begin = blockIdx.z * B::rows, start = s.causal ? begin : 0;
  const unsigned end =
      documents ? static_cast<unsigned>(visible.end_query(begin, begin + B::rows, tokens)) : tokens;
  const unsigned first = begin + threadIdx.x / 32 * (16 * M);
  AsyncCopies copies;
  QueryNumbers next;
  const auto copy_tile = [&](unsigned of_group, unsigned query, unsigned stage) {
    Bytes* const to = tiles + stage * 2 * B::tile_bytes;
    const unsigned channel = of_group * D;
    copy_rows<D, N>(copies, to, q_rows + channel, t.q.stride, query, tokens);
    copy_rows<D, N>(copies, to + B::tile_bytes, t.d_out + head.in_out + channel, s.channels(), query, tokens);
    copies.end_group();
    const std::size_t numbers_at = head.in_log_sum + std::size_t{of_group} * tokens;
    if (threadIdx.x < N) next.read(t.log_sum + numbers_at, t.delta + numbers_at, query + threadIdx.x, tokens);
  };
  const auto store_numbers = [&](unsigned stage) {
    if (threadIdx.x >= N) return;
    numbers[stage * 2 * N + threadIdx.x] = next.log_sum;
    numbers[stage * 2 * N + N + threadIdx.x] = next.delta;
  };
  copy_rows<D, B::rows>(copies, shared, t.k.at(head.key_row, head.key_channel), t.k.stride, begin, tokens);
  copy_rows<D, B::rows>(copies, shared + B::held_bytes, t.v.at(head.key_row, head.key_channel), t.v.stride,
                        begin, tokens);
  copy_tile(0, start, 0);
  store_numbers(0);

  HeldRows<D, M, (D * M <= 64)> k(shared), v(shared + B::held_bytes);
  Sums<M, D> d_k, d_v;
  clear(d_k), clear(d_v);
  unsigned stage = 0;
  for (unsigned of_group = 0, query = start; of_group < group; stage ^= 1) {
    copies.template wait<0>();
    __syncthreads();
    if (of_group == 0 && query == start) k.keep(), v.keep();
    const bool same_head = query + N < end, more = same_head || of_group + 1 < group;
    const unsigned next_of_group = of_group + !same_head, next_query = same_head ? query + N : start;
    if (more) copy_tile(next_of_group, next_query, stage ^ 1);
    if (!s.causal || query + N > first) {  // otherwise no query of the tile attends to a key of this warp
      const Bytes *const q = tiles + stage * 2 * B::tile_bytes, *const d_out = q + B::tile_bytes;
      const float* const mine = numbers + stage * 2 * N;
      Sums<M, N> p, d_p;
      multiply_rows<T>(p, k, q);
#pragma unroll
      for (int m = 0; m < M; ++m)
        for (int c = 0; c < N / 8; ++c)
          for (int i = 0; i < 4; ++i) {
            const unsigned column = column_of_lane(c) + static_cast<unsigned>(i % 2);
            const unsigned key = row_of_lane<M>(begin, m) + static_cast<unsigned>(i / 2 * 8);
            const float e = power_of_2(fmaf(p[m][c][i], s.scale * log2_e, -mine[column]));
            const bool seen = (!s.causal || key <= query + column) &&
                              (!documents || Documents<M>::at(visible, query + column, tokens) <= key);
            p[m][c][i] = seen ? e : 0;
          }
      mix<T, D>(d_v, p, d_out);
      multiply_rows<T>(d_p, v, d_out);
#pragma unroll
      for (int m = 0; m < M; ++m)
        for (int c = 0; c < N / 8; ++c)
          for (int i = 0; i < 4; ++i)
            p[m][c][i] *= d_p[m][c][i] - mine[N + column_of_lane(c) + static_cast<unsigned>(i % 2)];
      mix<T, D>(d_k, p, q);
    }
    if (more) store_numbers(stage ^ 1);
    of_group = next_of_group, query = next_query;
  }
  float of_k[M][2], of_v[M][2];
  for (int m = 0; m < M; ++m)
    for (int half = 0; half < 2; ++half) of_k[m][half] = s.scale, of_v[m][half] = 1;
  store_rows(t.d_k.at(head.key_row, head.key_channel), t.d_k.stride, begin, tokens, d_k, of_k);
  store_rows(t.d_v.at(head.key_row, head.key_channel), t.d_v.stride, begin, tokens, d_v, of_v);
}

// ---- launching

template <class... P, class... A>
void launch(const char* name, void (*kernel)(P...), const AttentionShape& s, std::size_t heads,
            std::size_t rows, std::size_t shared_bytes, const Stream& stream, const A&... args) {
  // Devices start blocks in the order of z, then y, then x. With a causal mask blocks of z = 0 take the
  // longest, for which the kernels choose their rows: they start first, and short ones fill the end.
  const cuda::Grid grid{{static_cast<unsigned>(heads), static_cast<unsigned>(s.batch),
                         static_cast<unsigned>((s.queries + rows - 1) / rows)},
                        {warps * 32},
                        shared_bytes};
  if (shared_bytes > 48 << 10) {
    const cuda::DeviceGuard guard(stream.device());
    cuda::check(cuda::runtime().allow_shared_bytes(reinterpret_cast<const void*>(kernel), shared_bytes), name,
                stream.device());
  }
  cuda::launch(name, kernel, grid, stream, args...);
}

template <int D, int M, int N, class T>
void forward(const AttentionShape& s, const AttentionForward<T>& t, const Stream& stream) {
  using F = Forward<D, M, N>;
  launch("attention", s.document_starts ? attend<T, D, M, N, true> : attend<T, D, M, N, false>, s, s.heads,
         F::rows, F::shared_bytes, stream, s, t);
}

template <int D, int M, int N, class T>
void backward_q(const AttentionShape& s, const AttentionBackward<T>& t, const Stream& stream) {
  using B = Backward<D, M, N>;
  launch("attention_backward_q",
         s.document_starts ? attend_backward_q<T, D, M, N, true> : attend_backward_q<T, D, M, N, false>, s,
         s.heads, B::rows, B::shared_bytes, stream, s, t);
}

template <int D, int M, int N, class T>
void backward_kv(const AttentionShape& s, const AttentionBackward<T>& t, const Stream& stream) {
  using B = Backward<D, M, N>;
  launch("attention_backward_kv",
         s.document_starts ? attend_backward_kv<T, D, M, N, true> : attend_backward_kv<T, D, M, N, false>, s,
         s.kv_heads(), B::rows, B::shared_bytes, stream, s, t);
}

}  // namespace

bool fits_tensor_cores(const AttentionShape& s) {
  return (s.size == 64 || s.size == 128) && !s.dropout.active() && s.queries < 1u << 22 &&
         s.keys == s.queries && s.rows == s.keys && s.past == 0 && s.key_counts == nullptr &&
         s.window >= s.queries;
}

// The largest fragments and tiles that 255 registers permit.
template <class T>
void attend_on_tensor_cores(const AttentionShape& s, const AttentionForward<T>& t, const Stream& stream) {
  if (s.size == 64) return forward<64, 2, 64>(s, t, stream);
  forward<128, 1, 64>(s, t, stream);
}

template <class T>
void attend_backward_on_tensor_cores(const AttentionShape& s, const AttentionBackward<T>& t,
                                     const Stream& stream) {
  if (s.size == 64) {
    backward_q<64, 2, 32>(s, t, stream);
    backward_kv<64, 2, 32>(s, t, stream);
  } else {
    backward_q<128, 1, 64>(s, t, stream);
    backward_kv<128, 1, 32>(s, t, stream);
  }
}

#define RZ_INSTANTIATE(T)                                                                                    \
  template void attend_on_tensor_cores<T>(const AttentionShape&, const AttentionForward<T>&, const Stream&); \
  template void attend_backward_on_tensor_cores<T>(const AttentionShape&, const AttentionBackward<T>&,       \
                                                   const Stream&);
RZ_INSTANTIATE(f16)
RZ_INSTANTIATE(bf16)
#undef RZ_INSTANTIATE

}  // namespace rz::kernels
