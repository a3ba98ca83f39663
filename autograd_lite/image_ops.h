#pragma once
/// The operators of tensor/image_ops.h on a tape, with PyTorch's names. A mismatch of shapes is
/// Errc::invalid_argument.
///
/// With Tape::autocast() conv2d casts its inputs to its dtype, batch_norm and group_norm cast theirs to f32,
/// and pools compute in the dtype of their input.

#include <functional>

#include "../tensor/image_ops.h"
#include "tape.h"

namespace rz::nn {

/// x[N, C, H, W], weight[O, C / groups, kh, kw] → [N, O, H', W']. A default Var means "no bias".
Var conv2d(Tape&, Var x, Var weight, Var bias, const ops::Conv2d& = {});

// ---- pooling of x[N, C, H, W]
Var max_pool2d(Tape&, Var x, const ops::Pool2d&);
Var avg_pool2d(Tape&, Var x, const ops::Pool2d&);
/// [N, C, size.h, size.w]
Var adaptive_avg_pool2d(Tape&, Var x, ops::Size2 size);

// ---- norms of x[N, C], [N, C, L] or [N, C, H, W], with weight[C] and bias[C]
/// Adds a small tensor of f64, {sums by channel, …}, over the ranks, in place and in stream order.
using SumOverRanks = std::function<void(const Tensor& sums, const Stream&)>;
struct BatchNorm {
  ops::RunningStatistics running;  ///< undefined in training: none are kept; in evaluation they are read
  bool training = true;
  float epsilon = 1e-5f;
  /// Statistics, and gradients through them, are those of the batches of all ranks, which may have unequal
  /// sizes. All ranks then record the same operators in the same order. Empty: of this rank's batch.
  SumOverRanks sum_over_ranks;
};
/// Errc::invalid_argument in training if a channel has one element only, unless ranks add theirs; and in
/// evaluation without running statistics. A recomputed scope (Tape::checkpoint) counts its batch twice, as in
/// PyTorch. The gradients of weight and bias are those of this rank's terms.
Var batch_norm(Tape&, Var x, Var weight, Var bias, const BatchNorm&);
/// Errc::invalid_argument if the channels do not divide into the groups.
Var group_norm(Tape&, Var x, std::size_t groups, Var weight, Var bias, float epsilon);

}  // namespace rz::nn
