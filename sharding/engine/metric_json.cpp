#include "sharding/engine/metric_json.h"

#include <limits>
#include <nlohmann/json.hpp>

namespace rz {
namespace {

nlohmann::json or_null(const std::optional<double>& x) { return x ? nlohmann::json(*x) : nlohmann::json(); }

/// The value of "best_metric", null or a number.
std::optional<double> read_best_value(const JsonObject& o) {
  if (!o.has("best_metric")) o.fail_at("best_metric", "is missing");
  if (o.at("best_metric").is_null()) return {};
  constexpr double max = std::numeric_limits<double>::max();
  return o.number("best_metric", 0, -max, max);
}

}  // namespace

nlohmann::json to_json(const BestMetric& b) {
  return {{"best_metric", or_null(b.value)},
          {"best_global_step", b.step},
          {"best_model_checkpoint", b.tag},
          {"greater_is_better", b.greater_is_better}};
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

nlohmann::json to_json(const EarlyStopping::State& s) {
  return {{"best_metric", or_null(s.best_metric)}, {"early_stopping_patience_counter", s.patience_counter}};
}

EarlyStopping::State early_stopping_from_json(const JsonObject& o) {
  EarlyStopping::State s{.best_metric = read_best_value(o)};
  s.patience_counter = static_cast<int>(
      o.required_integer("early_stopping_patience_counter", 0, std::numeric_limits<int>::max() - 1));
  return s;
}

}  // namespace rz
