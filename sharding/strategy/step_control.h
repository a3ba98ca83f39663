#pragma once
/// Norm of the gradients, and what follows from it for an update.

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "sharding/model/runtime.h"
#include "sharding/model/sharded_model.h"
#include "sharding/optim/optimizer.h"
#include "sharding/strategy/device_limits.h"
#include "sharding/strategy/loss_terms.h"
#include "sharding/strategy/update_settings.h"
#include "tensor/kernels/scalar/step_outcome.h"

namespace rz {

class SquareSum;

/// Decides how an update scales the gradients (number of terms of the loss, clipping, loss scale), and
/// whether it is skipped. If the gradients are on a device, the device decides.
class StepControl {
 public:
  StepControl(const ShardedModel&, Runtime&);

  UpdateSettings& settings() { return settings_; }
  /// On a device: writes the settings to its memory, for updates in a graph.
  void write_settings(const Stream& stream) {
    device_limits_.write({settings_.limits(), loss_gradient()}, stream);
  }

  // ---- the loss
  /// Weights of the micro-batches.
  LossTerms& terms() { return terms_; }
  /// UpdateSettings::loss_gradient().
  float loss_gradient() const;
  /// The same in device memory.
  Tensor device_loss_gradient(const Stream&);

  // ---- an update
  /// L2 norm of all gradients, as means over the terms of the loss, without the loss scale. Collective.
  double norm(const Stream&);
  /// Scales the gradients of the next update that is not decided by decide(). Returns norm(). Collective.
  double clip(double max_norm, const Stream&);
  /// There are new gradients; clip() applies to earlier ones.
  void reset_clipping() { clip_factor_ = 1; }
  struct Decision {
    bool differs = false;  ///< ranks have different hashes; on a device unknown: false
    bool skip = false;     ///< on a device unknown: false
    UpdateScale scale{};
  };
  /// The scale of an update after clip(). `hash`: of what is to be equal on all ranks. Collective.
  Decision scale(std::uint64_t hash, const Stream&);
  /// Sums the squares and decides on one update. Collective; on a device the host does not wait, and ignores
  /// the hash.
  Decision decide(std::uint64_t hash, const Stream&);
  /// The last decision. On a device this waits, as Communicator::synchronize() does. Errc::invalid_argument
  /// if there is none.
  StepOutcome outcome(const Stream&);

 private:
  bool is_counted() const { return terms_.counted() != LossTerms::Counted::nothing; }
  bool is_meta() const;
  /// Sums of an update: of squares, and of weights if they were counted.
  std::size_t summed() const { return is_counted() ? 2 : 1; }
  void add_squares(SquareSum&) const;
  /// The sums over the ranks, in one call of the communicator. False if their hashes differ, which are
  /// compared if there is one.
  bool all_reduce(std::span<ExactSum> sums, std::optional<std::uint64_t> hash);
  StepOutcome outcome_of(std::span<ExactSum, 2> sums, const StepLimits&) const;
  Decision decide_on_device(const Stream&);

  const ShardedModel& model_;
  Runtime& runtime_;
  UpdateSettings settings_;
  double clip_factor_ = 1;
  LossTerms terms_;
  std::vector<std::int64_t> exact_words_;  // kept so that an update allocates nothing
  StepOutcome outcome_;                    // in host memory
  // In device memory:
  Tensor norm_words_;      // squares of this rank
  Tensor sums_;            // squares and terms of all ranks
  Tensor device_outcome_;  // StepOutcome
  DeviceLimits device_limits_;
};

}  // namespace rz
