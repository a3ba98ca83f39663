#pragma once
/// Attention, forward and backward, with the rules of tensor/ops.h.
///
/// B batch, T queries, S keys, H query heads, K key heads, D channels per head. Heads lie side by side in a
/// row. q, k, v and their gradients may have a row stride, as columns() of one product have.

#include <cstddef>
#include <cstdint>

#include "tensor/ops.h"

namespace rz::ops {

/// As torch's scaled_dot_product_attention; names of FlashAttention and of config.json where it has none.
struct AttentionOptions {
  int heads = 1;
  /// Divides `heads`; 0: `heads`. Query head h attends to key head h / (heads / kv_heads).
  int kv_heads = 0;
  bool causal = false;     ///< query i attends to keys 0 … past + i
  std::size_t past = 0;    ///< position of query 0 among the keys
  std::size_t window = 0;  ///< of the keys that `causal` leaves, the last `window`; 0: all. Needs `causal`.
  float scale = 0;         ///< of the scores; 0: 1/sqrt(D)
  std::size_t keys = 0;    ///< rows of k and v that are used, for caches with more room; 0: all S
  /// i32 [B], on the device of the tensors; undefined: none is padding. Keys of sequence b from
  /// key_counts[b] on are padding, which no query attends to, and which is not read. Counts must lie in [0,
  /// keys]; on a device they are clamped.
  Tensor key_counts = {};
};

/// q[B, T, H·D], k and v[B, S, K·D] → out[B, T, H·D]. Writes log_sum[B, H, T] for backward (the probabilities
/// are not kept; Dao et al., arXiv:2205.14135). A query without a key has out 0 and log_sum -infinity.
/// Dropout applies to the probabilities: key j for query i of head h in sequence b is element ((b · H + h) ·
/// T + i) · keys + j of the mask. D is 256 at most on a device (Errc::unsupported).
void attention(const Tensor& out, const Tensor& log_sum, const Tensor& q, const Tensor& k, const Tensor& v,
               const AttentionOptions&, const DropoutMask&, const Stream&);
/// Stores all three gradients; rows of d_k and d_v that no query attends to become 0. The query heads of a
/// group are added in order.
void attention_backward(const Tensor& d_q, const Tensor& d_k, const Tensor& d_v, const Tensor& d_out,
                        const Tensor& out, const Tensor& log_sum, const Tensor& q, const Tensor& k,
                        const Tensor& v, const AttentionOptions&, const DropoutMask&, const Stream&);

}  // namespace rz::ops
