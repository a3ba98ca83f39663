#include "sharding/engine/best_metric.h"

#include <cmath>

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

}  // namespace rz
