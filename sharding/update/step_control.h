#pragma once
/// Norm of the gradients, and what follows from it for an update.

#include "sharding/optim/optimizer.h"
#include "sharding/runtime/runtime.h"
#include "sharding/stores/sharded_model.h"
#include "tensor/kernels/step_outcome.h"

namespace rz {

class SquareSum;

/// Decides how an update scales the gradients (clipping, loss scale), and whether it is skipped. If the
/// gradients are on a device, the device decides.
class StepControl {
 public:
  StepControl(const ShardedModel&, Runtime&);

  /// Sets the factor by which losses are multiplied from now on. Errc::invalid_argument unless it is positive
  /// and finite.
  void set_loss_scale(double);
  /// L2 norm of the means of all gradients, without the loss scale. Collective.
  double norm(const Stream&);
  /// Scales the gradients of the next update that is not decided by decide(). Returns norm(). Collective.
  double clip(double max_norm, const Stream&);
  /// There are new gradients; clip() applies to earlier ones.
  void reset_clipping() { clip_factor_ = 1; }
  /// The scale of an update after clip().
  UpdateScale scale() const { return {.factor = static_cast<float>(clip_factor_ / loss_scale_)}; }

  struct Policy {
    double max_norm = 0;  ///< 0: no clipping
    bool skip_overflow = false;
  };
  struct Decision {
    bool skip = false;  ///< on a device unknown: false
    UpdateScale scale{};
  };
  /// Sums the squares and decides on one update. Collective; on a device the host does not wait.
  Decision decide(const Policy&, const Stream&);
  /// The last decision. On a device this waits, as Communicator::synchronize() does. Errc::invalid_argument
  /// if there is none.
  StepOutcome outcome(const Stream&);

 private:
  void add_squares(SquareSum&) const;
  double sum_over_ranks(const SquareSum&);

  const ShardedModel& model_;
  Runtime& runtime_;
  double loss_scale_ = 1, clip_factor_ = 1;
  StepOutcome outcome_;    // in host memory
  Tensor device_outcome_;  // StepOutcome in device memory
  Tensor norm_words_;      // accumulator of the norm in device memory
};

}  // namespace rz
