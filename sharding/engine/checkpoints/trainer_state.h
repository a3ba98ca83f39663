#pragma once
/// What decides on the best checkpoint and on early stopping, and its JSON.

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "sharding/config/ds_config.h"
#include "sharding/engine/checkpoints/early_stopping.h"
#include "sharding/io/json.h"

namespace rz {

/// As TrainerState of Hugging Face. A run that is resumed goes on with it.
struct TrainerState {
  std::string metric;  ///< metric_for_best_model
  BestMetric best;
  std::optional<EarlyStopping> early_stopping;
  bool evaluation_due = false;  ///< the last update was to be evaluated, and was not
};

/// Before the first evaluation. Errc::config as for EarlyStopping.
TrainerState initial_trainer_state(const CheckpointConfig&);

/// JSON object.
std::string to_json(const TrainerState&);
/// Restores it from such an object; an empty one leaves it as it is. Values of another metric are not
/// comparable: the state is then left as it is. Errc::config names the file and the key of a value that is
/// missing or wrong; nothing is changed then.
void restore(TrainerState&, const std::string& text, const std::string& file);

/// An object with the names of Hugging Face's TrainerState, and "greater_is_better".
nlohmann::json to_json(const BestMetric&);
/// Errc::config names the file and the key of a value that is missing or wrong.
BestMetric best_metric_from_json(const JsonObject&);

/// "best_metric" and "early_stopping_patience_counter".
nlohmann::json to_json(const EarlyStopping::State&);
/// Errors as above.
EarlyStopping::State early_stopping_from_json(const JsonObject&);

}  // namespace rz
