#include "sharding/engine/early_stopping.h"

#include <cmath>

#include "comm/core/error.h"
#include "sharding/engine/best_metric.h"

namespace rz {

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
