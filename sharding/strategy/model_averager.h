#pragma once
/// Averaging of replicas that differ, as of post-local SGD.

#include <cstdint>

#include "autograd_lite/nn/module.h"
#include "comm/communicator.h"
#include "comm/device/stream.h"
#include "sharding/strategy/strategy.h"

namespace rz {

/// Names as in PyTorch's PeriodicModelAverager.
struct PeriodicModelAveragerOptions {
  std::int64_t period = 1;        ///< updates from one averaging to the next
  std::int64_t warmup_steps = 0;  ///< updates before the first
};

/// Replaces the trainable parameters of a replica by their means over the ranks, in every period-th update:
///
///     PeriodicModelAverager averager(*ddp, model, comm, {.period = 4, .warmup_steps = 100});
///     for (…) {
///       …
///       ddp->clip_and_step(*optimizer, {});
///       averager.average_parameters();
///     }
///
/// Means are formed in f32, in the order of ranks; in mixed precision those of the masters. Optimizer state
/// stays that of each rank. One thread a rank.
class PeriodicModelAverager {
 public:
  /// All must outlive this object; the communicator is that of the strategy, or of the same ranks.
  /// Errc::unsupported unless the strategy is ddp, in whose place others have one replica;
  /// Errc::invalid_argument for a period below 1 or negative warm-up steps.
  PeriodicModelAverager(Strategy&, Module&, Communicator&, const PeriodicModelAveragerOptions&);

  /// Call after each update, not during one. Averages if this is the update for it. Collective.
  void average_parameters();
  /// Calls so far.
  std::int64_t step() const { return step_; }

 private:
  bool is_due() const;
  void average();
  Tensor mean_of(const Parameter&);

  Strategy& strategy_;
  Module& module_;
  Communicator& communicator_;
  PeriodicModelAveragerOptions options_;
  Stream stream_;
  std::int64_t step_ = 0;
};

}  // namespace rz
