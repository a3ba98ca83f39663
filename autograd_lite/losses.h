#pragma once
/// Losses besides nn::cross_entropy, each as (sum, count) (nn::Loss): the mean of an update is the ratio of
/// the sums over micro-batches and ranks, whatever the sizes of their batches. With Tape::autocast() 16-bit
/// inputs are computed in f32.

#include <cstddef>
#include <functional>

#include "../tensor/loss_ops.h"
#include "ops.h"

namespace rz::nn {

/// Divergence of softmax(logits / temperature) from the targets, with a row a term: sum / count is what
/// torch.nn.functional.kl_div calls batchmean for logits [N, V]. Targets are constants with the shape of the
/// logits: probabilities, or with SoftLoss::logits those of a teacher. Errc::invalid_argument if
/// SoftLoss::divergence is false.
///
///     const ops::SoftLoss distill{.targets = ops::SoftLoss::logits, .temperature = 2, .weight = 4};
///     nn::Loss loss = nn::kl_div(tape, student, teacher, distill);
Loss kl_div(Tape&, Var logits, const Tensor& targets, ops::SoftLoss = {});
/// Cross entropy with probabilities as targets, one row per term.
Loss cross_entropy(Tape&, Var logits, const Tensor& probabilities, float temperature);
/// nn::cross_entropy with label smoothing and another ignore_index, as torch.nn.CrossEntropyLoss.
Loss cross_entropy(Tape&, Var logits, const Tensor& targets, ops::LabelLoss);
/// Squared differences, one element per term: sum / count is the mean squared error.
Loss squared_error(Tape&, Var prediction, const Tensor& target);
/// The loss of logits and targets from 0 to 1, one element per term, as torch's function of this name.
Loss binary_cross_entropy_with_logits(Tape&, Var logits, const Tensor& targets);

// ---- logits whose classes the ranks divide
/// The classes of this rank: those from `first` on, of `total`, as torch.chunk divides them.
struct ClassPart {
  std::size_t first, total;
  int ranks;
  const std::function<Tensor(Tape&, const Tensor&)>& gather;  ///< Exchange::gather
};
/// nn::cross_entropy of the whole logits, with the same bits on all ranks, which each hold one loss. They
/// exchange 8 bytes a row.
Loss cross_entropy(Tape&, Var part, const Tensor& targets, const ClassPart&);
/// The whole logits. Backward: the columns of this rank, as all ranks hold one loss.
Var gather_classes(Tape&, Var part, const ClassPart&);

// ---- metrics
/// f64 [2] on the device of the logits: {rows whose largest logit is that of the target, rows whose target is
/// not ignore_index}. Not recorded. EngineLoaderOptions::targets ignores rows that repeat samples.
Tensor accuracy(Tape&, Var logits, const Tensor& targets, std::int32_t ignore_index = -100);

}  // namespace rz::nn
