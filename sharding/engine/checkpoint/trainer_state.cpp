#include "sharding/engine/checkpoint/trainer_state.h"

#include <nlohmann/json.hpp>
#include <utility>

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

nlohmann::json to_json(const TrainerState& s) {
  // A run that is resumed with early stopping, and had none before, begins to count at the best value.
  const nlohmann::json none{{"best_metric", s.best.value ? nlohmann::json(*s.best.value) : nlohmann::json()},
                            {"early_stopping_patience_counter", 0}};
  return {{"metric_for_best_model", s.metric},
          {"best", to_json(s.best)},
          {"early_stopping", s.early_stopping ? s.early_stopping->state() : none}};
}

void restore(TrainerState& s, const JsonObject& o) {
  const BestMetric best = best_metric_from_json(o.object("best"));
  if (o.text("metric_for_best_model", "") != s.metric || best.greater_is_better != s.best.greater_is_better)
    return;
  if (s.early_stopping) s.early_stopping->load_state(o.object("early_stopping"));
  s.best = best;
}

}  // namespace rz
