#include "sharding/engine/trainer_state.h"

#include <nlohmann/json.hpp>

#include "sharding/engine/metric_json.h"

namespace rz {

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
