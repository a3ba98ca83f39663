#pragma once
/// The operators of tensor/attention_ops.h on a tape, with the rules of autograd_lite/ops.h.

#include <cstddef>

#include "autograd_lite/tape.h"
#include "tensor/attention_ops.h"

namespace rz::nn {

using ops::AttentionOptions;
using ops::RotaryTables;

/// q[B, T, H·D], k and v[B, S, K·D] → [B, T, H·D]. Dropout of the probabilities consumes B · H · T · keys of
/// the tape's random numbers.
Var attention(Tape&, Var q, Var k, Var v, const AttentionOptions&, float dropout = 0);
/// attention() of the thirds of qkv[B, T, 3C] → [B, T, C].
Var self_attention(Tape&, Var qkv, const AttentionOptions&, float dropout = 0);
/// The same, causal.
Var causal_attention(Tape&, Var qkv, int heads, float dropout = 0);
/// x[B, T, H·D] with its heads rotated. Position of token t in sequence b: positions[b, t], or past + t if
/// `positions` (i32) is undefined.
Var rotary(Tape&, Var x, int heads, const RotaryTables&, std::size_t past = 0, const Tensor& positions = {});

}  // namespace rz::nn
