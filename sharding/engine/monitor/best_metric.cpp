#include "sharding/engine/monitor/best_metric.h"

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

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

nlohmann::json to_json(const BestMetric& b) {
  return {{"best_metric", b.value ? nlohmann::json(*b.value) : nlohmann::json()},
          {"best_global_step", b.step},
          {"best_model_checkpoint", b.tag},
          {"greater_is_better", b.greater_is_better}};
}

std::optional<double> read_best_value(const JsonObject& o) {
  if (!o.has("best_metric")) o.fail_at("best_metric", "is missing");
  if (o.at("best_metric").is_null()) return {};
  constexpr double max = std::numeric_limits<double>::max();
  return o.number("best_metric", 0, -max, max);
}

BestMetric best_metric_from_json(const JsonObject& o) {
  for (const char* key : {"best_model_checkpoint", "greater_is_better"})
    if (!o.has(key)) o.fail_at(key, "is missing");
  BestMetric b;
  b.value = read_best_value(o);
  b.step = static_cast<std::uint64_t>(
      o.required_integer("best_global_step", 0, std::numeric_limits<std::int64_t>::max()));
  b.tag = o.text("best_model_checkpoint", "");
  b.greater_is_better = o.boolean("greater_is_better", false);
  return b;
}

}  // namespace rz
