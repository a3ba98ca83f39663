#pragma once
/// Definitions shared by the attention kernels of CUDA devices. Tensors as in tensor/ops.h.

#include <cstddef>
#include <cstdint>

#include "comm/device/stream.h"
#include "tensor/kernels/attention/visible_keys.h"
#include "tensor/kernels/elementwise/dropout_params.h"
#include "tensor/kernels/elementwise/philox.h"

namespace rz::kernels {

/// Query heads, keys and channels as in tensor/attention_ops.h. out and d_out are contiguous.
struct AttentionShape {
  std::size_t batch, queries, keys, rows;  ///< keys: those in use of the `rows` of k and v
  std::size_t heads, group, size;          ///< `group` query heads per key head; `size` channels per head
  float scale;
  bool causal;
  std::size_t past, window;                          ///< window: at least 1
  const std::int32_t *key_counts, *document_starts;  ///< or null
  DropoutParams dropout;

  RZ_HOST_DEVICE std::size_t channels() const { return heads * size; }
  RZ_HOST_DEVICE std::size_t kv_heads() const { return heads / group; }
  /// Reads key_counts.
  RZ_HOST_DEVICE VisibleKeys visible(std::size_t b) const {
    VisibleKeys v{keys, causal, past, window};
    if (key_counts) {
      const std::int32_t count = key_counts[b] < 0 ? 0 : key_counts[b];
      if (static_cast<std::size_t>(count) < keys) v.keys = static_cast<std::size_t>(count);
    }
    if (document_starts) v.document_starts = document_starts + b * queries;
    return v;
  }
};

/// Rows that are `stride` elements apart.
template <class T>
struct StridedRows {
  T* data;
  std::size_t stride;
  RZ_HOST_DEVICE T* at(std::size_t row, std::size_t channel) const { return data + row * stride + channel; }
};

/// Where query head h of sequence b begins, and the key head that it attends to.
struct HeadPlace {
  std::size_t query_row, key_row, channel, key_channel;
  std::size_t in_out, in_log_sum;
  std::uint64_t decisions;
  RZ_HOST_DEVICE HeadPlace(const AttentionShape& s, std::size_t b, std::size_t h)
      : query_row(b * s.queries),
        key_row(b * s.rows),
        channel(h * s.size),
        key_channel(h / s.group * s.size),
        in_out(query_row * s.channels() + channel),
        in_log_sum((b * s.heads + h) * s.queries),
        decisions(s.dropout.decision(in_log_sum * s.keys)) {}
};

template <class T>
struct AttentionForward {
  T* out;
  float* log_sum;
  StridedRows<const T> q, k, v;
};

/// delta[B, H, T] = sum of out · d_out over a head's channels.
template <class T>
struct AttentionBackward {
  StridedRows<T> d_q, d_k, d_v;
  const T* d_out;
  StridedRows<const T> q, k, v;
  const float *log_sum, *delta;
};

/// True if attend_few_queries() supports the shape, and is faster: as few as a text that is continued has,
/// without dropout.
bool are_few_queries(const AttentionShape&);
template <class T>
void attend_few_queries(const AttentionShape&, const AttentionForward<T>&, const Stream&);

/// True if the tensor-core kernels support the shape, for f16 and bf16: as many keys as queries, all of them
/// in use, heads of 64 or 128 channels, no window, no dropout.
bool fits_tensor_cores(const AttentionShape&);
/// True if they support these rows: 16-byte alignment.
template <class T>
bool fits_tensor_cores(const StridedRows<T>& rows) {
  return reinterpret_cast<std::uintptr_t>(rows.data) % 16 == 0 && rows.stride % 8 == 0;
}
template <class T>
void attend_on_tensor_cores(const AttentionShape&, const AttentionForward<T>&, const Stream&);
template <class T>
void attend_backward_on_tensor_cores(const AttentionShape&, const AttentionBackward<T>&, const Stream&);

}  // namespace rz::kernels
