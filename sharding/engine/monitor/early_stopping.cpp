#include "sharding/engine/monitor/early_stopping.h"

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "comm/core/error.h"
#include "sharding/engine/monitor/best_metric.h"

namespace rz {

EarlyStopping::EarlyStopping(Options options) : options_(options) {
  require(options.early_stopping_patience >= 1, Errc::config,
          "early_stopping_patience must be at least 1, but is ", options.early_stopping_patience);
  require(std::isfinite(options.early_stopping_threshold) && options.early_stopping_threshold >= 0,
          Errc::config, "early_stopping_threshold must be a number from 0, but is ",
          options.early_stopping_threshold);
}

bool EarlyStopping::update(double metric) {
  const bool better = improves(metric, best_, options_.greater_is_better);
  const bool enough = better && (!best_ || std::abs(metric - *best_) > options_.early_stopping_threshold);
  if (better) best_ = metric;
  patience_counter_ = enough ? 0 : patience_counter_ + 1;
  return should_stop();
}

nlohmann::json EarlyStopping::state() const {
  return {{"best_metric", best_ ? nlohmann::json(*best_) : nlohmann::json()},
          {"early_stopping_patience_counter", patience_counter_}};
}

void EarlyStopping::load_state(const JsonObject& o) {
  const auto best = read_best_value(o);
  patience_counter_ = static_cast<int>(
      o.required_integer("early_stopping_patience_counter", 0, std::numeric_limits<int>::max() - 1));
  best_ = best;
}

}  // namespace rz
