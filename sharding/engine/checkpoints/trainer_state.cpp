#include "sharding/engine/checkpoints/trainer_state.h"

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

TrainerState initial_trainer_state(const CheckpointConfig& c) {
  TrainerState s{.metric = c.metric_for_best_model, .best = {.greater_is_better = c.greater_is_better}};
  if (c.early_stopping_patience)
    s.early_stopping.emplace(
        EarlyStopping::Options{.early_stopping_patience = static_cast<int>(*c.early_stopping_patience),
                               .early_stopping_threshold = c.early_stopping_threshold,
                               .greater_is_better = c.greater_is_better});
  return s;
}

std::string to_json(const TrainerState& s) {
  // A run that is resumed with early stopping, and had none before, counts from the best value.
  const EarlyStopping::State none{.best_metric = s.best.value};
  const nlohmann::json all{{"metric_for_best_model", s.metric},
                           {"best", to_json(s.best)},
                           {"evaluation_due", s.evaluation_due},
                           {"early_stopping", to_json(s.early_stopping ? s.early_stopping->state() : none)}};
  return all.dump();
}

void restore(TrainerState& s, const std::string& text, const std::string& file) {
  const nlohmann::json document = parse_json(text, file, JsonDialect::strict);
  if (document.empty()) return;
  const JsonObject o(document, file, "state.trainer_state");
  s.evaluation_due = o.boolean("evaluation_due", false);
  const BestMetric best = best_metric_from_json(o.object("best"));
  const EarlyStopping::State stopping = early_stopping_from_json(o.object("early_stopping"));
  if (o.text("metric_for_best_model", "") != s.metric || best.greater_is_better != s.best.greater_is_better)
    return;
  if (s.early_stopping) s.early_stopping->set_state(stopping);
  s.best = best;
}

}  // namespace rz
