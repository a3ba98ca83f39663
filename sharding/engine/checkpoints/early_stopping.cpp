#include "sharding/engine/checkpoints/early_stopping.h"

#include <cmath>

#include "comm/core/error.h"

namespace rz {

bool improves(double metric, const std::optional<double>& best, bool greater_is_better) {
  if (!std::isfinite(metric)) return false;
  return !best || (greater_is_better ? metric > *best : metric < *best);
}

bool BestMetric::update(double metric, std::uint64_t at_step, const std::string& checkpoint_tag) {
  if (!improves(metric, value, greater_is_better)) return false;
  value = metric;
  step = at_step;
  tag = checkpoint_tag;
  return true;
}

EarlyStopping::EarlyStopping(Options options) : options_(options) {
  require(options.early_stopping_patience >= 1, Errc::config,
          "early_stopping_patience must be at least 1, but is ", options.early_stopping_patience);
  require(std::isfinite(options.early_stopping_threshold) && options.early_stopping_threshold >= 0,
          Errc::config, "early_stopping_threshold must be a number from 0, but is ",
          options.early_stopping_threshold);
}

bool EarlyStopping::update(double metric) {
  const bool better = improves(metric, state_.best_metric, options_.greater_is_better);
  const bool enough = better && (!state_.best_metric ||
                                 std::abs(metric - *state_.best_metric) > options_.early_stopping_threshold);
  if (better) state_.best_metric = metric;
  state_.patience_counter = enough ? 0 : state_.patience_counter + 1;
  return should_stop();
}

}  // namespace rz
