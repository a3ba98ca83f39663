#pragma once
/// The operators of tensor/attention_ops.h on a tape, with the rules of autograd_lite/ops.h.

#include <cstddef>

#include "../tensor/attention_ops.h"
#include "tape.h"

namespace rz::nn {

using ops::AttentionOptions;
using ops::RotaryTables;

/// q[B, T, H·D], k and v[B, S, K·D] → [B, T, H·D]. Dropout of the probabilities consumes B · H · T · keys of
/// the tape's random numbers. If these are the heads of one of several ranks, the mask is their part of that
/// of all.
Var attention(Tape&, Var q, Var k, Var v, const AttentionOptions&, float dropout = 0, RankOf heads_of = {});
/// attention() of the thirds of qkv[B, T, 3C] → [B, T, C].
Var self_attention(Tape&, Var qkv, const AttentionOptions&, float dropout = 0, RankOf heads_of = {});
/// The same, causal.
Var causal_attention(Tape&, Var qkv, int heads, float dropout = 0);
/// x[B, T, H·D] with its heads rotated. Position of token t in sequence b: positions[b, t], or past + t if
/// `positions` (i32) is undefined.
Var rotary(Tape&, Var x, int heads, const RotaryTables&, std::size_t past = 0, const Tensor& positions = {});

/// The tables of a model, which grow with its longest sequence.
class RotaryEmbedding {
 public:
  /// The first `rotated` channels of each head are rotated. Sequences have `positions` tokens at most, with
  /// dynamic scaling RotaryOptions::factor times as many.
  RotaryEmbedding(std::size_t rotated, std::size_t positions, const ops::RotaryOptions&);

  std::size_t max_positions() const;
  /// Longer sequences have tables of their length (ModelFacts::length_matters_from); 0: none.
  std::size_t length_matters_from() const { return is_dynamic() ? positions_ : 0; }
  /// The tables of a sequence of `length` tokens, on the device of the stream. They live as long as a copy of
  /// them.
  RotaryTables tables(std::size_t length, const Stream&);

 private:
  bool is_dynamic() const { return options_.scaling == ops::RotaryOptions::Scaling::dynamic; }

  std::size_t rotated_, positions_;
  ops::RotaryOptions options_;
  RotaryTables tables_;
  std::size_t length_ = 0;  ///< of tables_
};

}  // namespace rz::nn
