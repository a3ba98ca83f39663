#pragma once
/// Uneven inputs: ranks that run out of batches at different times.

#include <cstdint>
#include <vector>

#include "../../comm/communicator.h"

namespace rz {

/// Names as in PyTorch's Join.
struct JoinOptions {
  /// Losses without terms: means divide by the number of all ranks, as DDP does otherwise; false: of those
  /// that have data. Losses with terms are means over the terms either way.
  bool divide_by_initial_world_size = true;
  /// Errc::mismatch names the ranks that have run out, instead of waiting for the others.
  bool throw_on_early_termination = false;
};

/// Finds out which ranks still have data. A rank without takes part in the calls of the others:
///
///     Join join(comm);
///     while (join.next(!batches.empty())) {
///       strategy->zero_grad();
///       if (join.active())
///         strategy->backward(tape, model.loss(tape, batches.next()));
///       else
///         strategy->backward_without_data();
///       strategy->finish_gradients();
///       strategy->clip_and_step(*optimizer, {});
///     }
///
/// Updates are made on all ranks, so replicas stay equal. zero3 gathers values in every pass and has no
/// backward_without_data(): there a rank without data runs the model on a batch whose targets are all
/// ignored (-100). Not thread-safe.
class Join {
 public:
  /// The communicator must outlive this object.
  explicit Join(Communicator& communicator, const JoinOptions& options = {})
      : communicator_(communicator), options_(options) {}

  /// Call before each micro-batch, and not between begin_backward() and finish_gradients(). Returns whether
  /// any rank has data. Collective.
  bool next(bool has_data);
  /// Whether this rank has data, as passed to next().
  bool active() const { return active_; }
  /// Number of ranks that have data.
  int active_ranks() const { return active_ranks_; }
  /// Micro-batches of this rank so far.
  std::int64_t batches() const { return batches_; }
  /// The factor of Tape::backward() for a loss without terms.
  float loss_factor() const;

 private:
  Communicator& communicator_;
  JoinOptions options_;
  bool active_ = false;
  int active_ranks_ = 0;
  std::int64_t batches_ = 0;
};

}  // namespace rz
