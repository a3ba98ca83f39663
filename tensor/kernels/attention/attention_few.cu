// Attention of a few queries to many keys, as where a text is continued from a cache. A block has some
// queries of one key head, those of all query heads of its group, and a part of the keys, whose rows its
// warps read in turn, each once, a lane some channels. The results of warps, then those of parts, are merged
// in order.

#include <cmath>

#include "comm/core/math.h"
#include "comm/device/launch.h"
#include "tensor/kernels/attention/attention_device.h"

namespace rz::kernels {

namespace {

constexpr unsigned few_warps = 8, few_rows = 4, every_lane = 0xffffffffu;
constexpr std::size_t keys_of_part = 128;

/// A sum over keys of e^(score - row_max), and of v by these weights, is a part of a softmax.
struct PartialRow {
  float row_max, sum;
};

/// By which a sum that was made with another maximum is multiplied.
__device__ float factor_of(float row_max, float now) { return now == -INFINITY ? 0.0f : expf(row_max - now); }

__device__ float sum_of_lanes(float x) {
  for (int bits = 16; bits; bits >>= 1) x += __shfl_xor_sync(every_lane, x, bits);
  return x;
}

/// The rows of a key head: query i of query head h of the group is row h · queries + i.
struct FewRows {
  std::size_t first, count;  ///< of this block
  __device__ FewRows(const AttentionShape& s, unsigned block) : first(std::size_t{block} * few_rows) {
    const std::size_t all = s.group * s.queries;
    count = all - first < few_rows ? all - first : few_rows;
  }
};

/// Results of parts in the stream's workspace: the rows of [B, H, T, parts], and their sums of v, `size`
/// each.
struct Parts {
  PartialRow* rows;
  float* out;
  std::size_t count;
};

/// Partial results of one row, of warps or of parts. Rows and their sums of v are `row_pitch` and `pitch`
/// apart.
struct Merge {
  const PartialRow* rows;
  std::size_t row_pitch;
  const float* sums;
  std::size_t pitch, count;

  __device__ PartialRow row() const {
    PartialRow all{-INFINITY, 0};
    for (std::size_t p = 0; p < count; ++p) all.row_max = fmaxf(all.row_max, rows[p * row_pitch].row_max);
    for (std::size_t p = 0; p < count; ++p)
      all.sum += rows[p * row_pitch].sum * factor_of(rows[p * row_pitch].row_max, all.row_max);
    return all;
  }
  __device__ float sum(std::size_t channel, const PartialRow& all) const {
    float x = 0;
    for (std::size_t p = 0; p < count; ++p)
      x += sums[p * pitch + channel] * factor_of(rows[p * row_pitch].row_max, all.row_max);
    return x;
  }
  /// By the threads of a block.
  template <class T>
  __device__ void finish(T* out, float* log_sum, std::size_t size) const {
    const PartialRow all = row();
    for (std::size_t c = threadIdx.x; c < size; c += blockDim.x)
      out[c] = from_f32<T>(all.sum == 0 ? 0.0f : sum(c, all) / all.sum);
    if (threadIdx.x == 0) *log_sum = all.row_max + logf(all.sum);
  }
};

/// C times 32 channels.
template <class T, int C>
__global__ void __launch_bounds__(few_warps * 32)
    attend_few(AttentionShape s, AttentionForward<T> t, Parts parts) {
  RZ_SHARED(float, all_sums, few_warps* few_rows* C * 32);
  RZ_SHARED(PartialRow, all_rows, few_warps * few_rows);
  const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const std::size_t blocks_of_head = gridDim.y / s.kv_heads(), key_head = blockIdx.y / blocks_of_head;
  const FewRows rows(s, static_cast<unsigned>(blockIdx.y % blocks_of_head));
  const HeadPlace head(s, blockIdx.z, key_head * s.group);  // the first query head
  const VisibleKeys visible = s.visible(blockIdx.z);
  const auto channel_of = [&](int c) { return lane + 32 * static_cast<unsigned>(c); };
  float q[few_rows][C], out[few_rows][C] = {};
  PartialRow running[few_rows];
  for (unsigned r = 0; r < few_rows; ++r) {
    const std::size_t row = rows.first + r, h = row / s.queries, i = row % s.queries;
    running[r] = {-INFINITY, 0};
    for (int c = 0; c < C; ++c)
      q[r][c] = r < rows.count && channel_of(c) < s.size
                    ? to_f32(*t.q.at(head.query_row + i, head.channel + h * s.size + channel_of(c)))
                    : 0.0f;
  }
  const std::size_t part = std::size_t{blockIdx.x} * keys_of_part, from = visible.begin(0);
  const std::size_t last = visible.end(s.queries - 1),
                    end = part + keys_of_part < last ? part + keys_of_part : last;
  for (std::size_t j = (from > part ? from : part) + warp; j < end; j += few_warps) {
    float k[C], v[C];
    for (int c = 0; c < C; ++c) {
      const bool there = channel_of(c) < s.size;
      k[c] = there ? to_f32(*t.k.at(head.key_row + j, head.key_channel + channel_of(c))) : 0.0f;
      v[c] = there ? to_f32(*t.v.at(head.key_row + j, head.key_channel + channel_of(c))) : 0.0f;
    }
#pragma unroll
    for (unsigned r = 0; r < few_rows; ++r) {
      const std::size_t i = (rows.first + r) % s.queries;
      if (r >= rows.count || j < visible.begin(i) || j >= visible.end(i)) continue;  // alike in a warp
      float score = 0;
      for (int c = 0; c < C; ++c) score += q[r][c] * k[c];
      score = sum_of_lanes(score) * s.scale;
      const float now = fmaxf(running[r].row_max, score), keep = factor_of(running[r].row_max, now),
                  p = factor_of(score, now);
      running[r].row_max = now, running[r].sum = running[r].sum * keep + p;
      for (int c = 0; c < C; ++c) out[r][c] = out[r][c] * keep + p * v[c];
    }
  }
  for (unsigned r = 0; r < few_rows; ++r) {
    if (lane == 0) all_rows[warp * few_rows + r] = running[r];
    for (int c = 0; c < C; ++c) all_sums[(warp * few_rows + r) * C * 32 + channel_of(c)] = out[r][c];
  }
  __syncthreads();
  for (unsigned r = 0; r < rows.count; ++r) {
    const std::size_t row = rows.first + r, h = row / s.queries, i = row % s.queries;
    const std::size_t in_log_sum = head.in_log_sum + row, at = in_log_sum * parts.count + blockIdx.x;
    const Merge merge{&all_rows[r], few_rows, &all_sums[r * C * 32], few_rows * C * 32, few_warps};
    if (parts.count == 1) {
      merge.finish(t.out + head.in_out + h * s.size + i * s.channels(), t.log_sum + in_log_sum, s.size);
      continue;
    }
    const PartialRow all = merge.row();
    if (threadIdx.x == 0) parts.rows[at] = all;
    for (std::size_t c = threadIdx.x; c < s.size; c += blockDim.x)
      parts.out[at * s.size + c] = merge.sum(c, all);
  }
}

/// A block per row.
template <class T>
__global__ void merge_parts(AttentionShape s, AttentionForward<T> t, Parts parts) {
  const HeadPlace head(s, blockIdx.z, blockIdx.y);
  const std::size_t row = head.in_log_sum + blockIdx.x;
  const Merge merge{parts.rows + row * parts.count, 1, parts.out + row * parts.count * s.size, s.size,
                    parts.count};
  merge.finish(t.out + head.in_out + blockIdx.x * s.channels(), t.log_sum + row, s.size);
}

}  // namespace

bool are_few_queries(const AttentionShape& s) {
  return s.queries <= 4 && s.queries < s.keys && s.dropout.threshold == 0;
}

template <class T>
void attend_few_queries(const AttentionShape& s, const AttentionForward<T>& t, const Stream& stream) {
  Parts parts{nullptr, nullptr, (s.keys + keys_of_part - 1) / keys_of_part};
  const std::size_t rows = s.batch * s.heads * s.queries, partial = rows * parts.count;
  if (parts.count > 1) {
    parts.rows =
        static_cast<PartialRow*>(stream.workspace(partial * (sizeof(PartialRow) + s.size * sizeof(float))));
    parts.out = reinterpret_cast<float*>(parts.rows + partial);
  }
  const std::size_t blocks = (s.group * s.queries + few_rows - 1) / few_rows * s.kv_heads();
  const auto launch = [&](auto kernel) {
    cuda::launch(
        "attention_few", kernel,
        {{static_cast<unsigned>(parts.count), static_cast<unsigned>(blocks), static_cast<unsigned>(s.batch)},
         {few_warps * 32}},
        stream, s, t, parts);
  };
  if (s.size <= 32)
    launch(attend_few<T, 1>);
  else if (s.size <= 64)
    launch(attend_few<T, 2>);
  else if (s.size <= 128)
    launch(attend_few<T, 4>);
  else
    launch(attend_few<T, 8>);
  if (parts.count > 1)
    cuda::launch(
        "merge_parts", merge_parts<T>,
        {{static_cast<unsigned>(s.queries), static_cast<unsigned>(s.heads), static_cast<unsigned>(s.batch)},
         {64}},
        stream, s, t, parts);
}

template void attend_few_queries(const AttentionShape&, const AttentionForward<float>&, const Stream&);
template void attend_few_queries(const AttentionShape&, const AttentionForward<f16>&, const Stream&);
template void attend_few_queries(const AttentionShape&, const AttentionForward<bf16>&, const Stream&);

}  // namespace rz::kernels
