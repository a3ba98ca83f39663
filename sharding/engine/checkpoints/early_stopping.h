#pragma once
/// The end of a training that has stopped to improve.

#include <cstdint>
#include <optional>

#include "sharding/engine/checkpoints/checkpoint_options.h"

namespace rz {

/// True if `metric` is better than `best`, or is the first. NaN and infinities are no value: they are never
/// better, so that a diverged evaluation is not kept as the best.
bool improves(double metric, const std::optional<double>& best, bool greater_is_better);

/// Decides when training stops, by the rule of Hugging Face's EarlyStoppingCallback: after
/// `early_stopping_patience` evaluations in a row that are not better than the best one before by more than
/// `early_stopping_threshold`. A value that is better by less becomes the best one, but does not restart the
/// count.
class EarlyStopping {
 public:
  struct Options {
    int early_stopping_patience = 1;
    double early_stopping_threshold = 0;
    bool greater_is_better = false;  ///< false for a loss
  };
  /// Errc::config unless the patience is positive and the threshold finite and not negative.
  explicit EarlyStopping(Options);

  /// Called after every evaluation, with a metric that is equal on all ranks; true if training is to stop.
  bool update(double metric);
  bool should_stop() const { return state_.patience_counter >= options_.early_stopping_patience; }

  /// What a run that is resumed needs.
  struct State {
    std::optional<double> best_metric;
    int patience_counter = 0;  ///< evaluations without improvement
    bool operator==(const State&) const = default;
  };
  const State& state() const { return state_; }
  void set_state(const State& state) { state_ = state; }

 private:
  Options options_;
  State state_;
};

}  // namespace rz
