#pragma once
/// Definitions shared by the attention kernels of CUDA devices. Tensors as in tensor/ops.h.

#include <cstddef>
#include <cstdint>

#include "comm/device/stream.h"
#include "tensor/kernels/elementwise/dropout_params.h"
#include "tensor/kernels/elementwise/philox.h"

namespace rz::kernels {

struct AttentionShape {
  std::size_t batch, tokens, heads, size;  ///< `size` channels per head
  float scale;
  DropoutParams dropout;
  std::uint64_t decisions;  ///< index of the first dropout decision

  RZ_HOST_DEVICE std::size_t channels() const { return heads * size; }
  RZ_HOST_DEVICE std::size_t stride() const { return 3 * channels(); }  ///< of qkv
};

/// Offsets of the first element of head h in sequence b.
struct HeadPlace {
  std::size_t in_out, in_qkv, in_log_sum;
  std::uint64_t decisions;
  RZ_HOST_DEVICE HeadPlace(const AttentionShape& s, std::size_t b, std::size_t h)
      : in_out(b * s.tokens * s.channels() + h * s.size),
        in_qkv(b * s.tokens * s.stride() + h * s.size),
        in_log_sum((b * s.heads + h) * s.tokens),
        decisions(s.decisions + in_log_sum * s.tokens) {}
};

template <class T>
struct AttentionForward {
  T* out;
  float* log_sum;
  const T* qkv;
};

/// delta[B, H, T] = sum of out · d_out over a head's channels.
template <class T>
struct AttentionBackward {
  T* d_qkv;
  const T *d_out, *qkv;
  const float *log_sum, *delta;
};

/// True if the tensor-core kernels support the call: f16 or bf16, heads of 64 or 128 channels, no dropout,
/// 16-byte alignment.
template <class T>
bool fits_tensor_cores(const AttentionShape&, const T* qkv, const T* out);
template <class T>
void attend_on_tensor_cores(const AttentionShape&, const AttentionForward<T>&, const Stream&);
template <class T>
void attend_backward_on_tensor_cores(const AttentionShape&, const AttentionBackward<T>&, const Stream&);

}  // namespace rz::kernels
