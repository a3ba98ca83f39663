#pragma once
/// The best value of a metric so far.

#include <cstdint>
#include <optional>
#include <string>

namespace rz {

/// True if `metric` is better than `best`, or is the first. NaN and infinities are no value: they are never
/// better, so that a diverged evaluation is not kept as the best.
bool improves(double metric, const std::optional<double>& best, bool greater_is_better);

/// As best_metric, best_global_step and best_model_checkpoint of Hugging Face's TrainerState.
struct BestMetric {
  bool greater_is_better = false;  ///< false for a loss
  std::optional<double> value;     ///< empty before the first finite value
  std::uint64_t step = 0;          ///< the number of updates when it was measured
  std::string tag;                 ///< of the checkpoint that has it

  /// Keeps the value if it is the best so far; true if it is. Of equal values the first stays.
  bool update(double metric, std::uint64_t at_step, const std::string& checkpoint_tag);
  bool operator==(const BestMetric&) const = default;
};

}  // namespace rz
