#pragma once
/// Attention, and rotary position embedding, forward and backward, with the rules of tensor/ops.h.
///
/// B batch, T queries, S keys, H query heads, K key heads, D channels per head. Heads lie side by side in a
/// row. q, k, v, x, their gradients and the result of rotary() may have a row stride, as columns() of one
/// product have.

#include <cstddef>
#include <cstdint>
#include <span>

#include "ops.h"

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
  /// i32 [B, T], on the device of the tensors; undefined: a sequence is one document. Of documents that are
  /// packed into a sequence: query t of sequence b does not attend to keys before document_starts[b, t], the
  /// key at which its document begins. Needs `causal`. The starts of a sequence must not decrease, and that
  /// of a query must be in [0, past + t]; on a device they are clamped, and not checked.
  Tensor document_starts = {};
};

/// The document_starts of a sequence of tokens, without a cache: a document ends with `eos_token_id`, which
/// belongs to it. Errc::invalid_argument unless there are as many starts as tokens.
void find_document_starts(std::span<std::int32_t> starts, std::span<const std::int32_t> tokens,
                          std::int32_t eos_token_id);

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

/// Frequencies of rotary position embedding (Su et al., arXiv:2104.09864). Members are named as in
/// config.json's rope_scaling.
struct RotaryOptions {
  enum class Scaling { none, linear, dynamic, llama3 };
  double theta = 10000;  ///< rope_theta
  Scaling scaling = Scaling::none;
  double factor = 1;
  double low_freq_factor = 1, high_freq_factor = 4;  ///< llama3
  /// llama3, dynamic: positions of the training. For `dynamic`, max_position_embeddings.
  std::size_t original_max_position_embeddings = 0;
};
/// f32 [positions, R/2]: cosine and sine of position · frequency, for heads whose first R channels are
/// rotated.
struct RotaryTables {
  Tensor cosines, sines;
};
/// Computed in double and rounded once, on the stream's device. With Scaling::dynamic they are those of a
/// sequence of `positions` positions. Errc::invalid_argument if R is odd or 0, or an option is out of range.
RotaryTables rotary_tables(std::size_t rotated, std::size_t positions, const RotaryOptions& = {},
                           const Stream& = {});

enum class Rotation : bool { forward, inverse };
/// x[B, T, H·D] → out: in each head channel c < R/2 and channel c + R/2 are rotated by the angle of their
/// position and c, as in Hugging Face's Llama ("rotate half"); channels from R on are copied. Position of
/// token t in sequence b: positions[b, t] (i32), or past + t if `positions` is undefined. out may be x. On
/// the host, Errc::invalid_argument names the first position outside the tables; on a device its row becomes
/// NaN. Backward is the inverse rotation of d_out.
void rotary(const Tensor& out, const Tensor& x, int heads, const Tensor& cosines, const Tensor& sines,
            const Tensor& positions, std::size_t past, Rotation, const Stream&);

}  // namespace rz::ops
