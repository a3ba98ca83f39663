#pragma once
/// The best metric and the state of early stopping in a checkpoint.

#include <nlohmann/json_fwd.hpp>

#include "sharding/engine/early_stopping.h"
#include "sharding/io/json.h"

namespace rz {

/// An object with the names of Hugging Face's TrainerState, and "greater_is_better".
nlohmann::json to_json(const BestMetric&);
/// Errc::config names the file and the key of a value that is missing or wrong.
BestMetric best_metric_from_json(const JsonObject&);

/// "best_metric" and "early_stopping_patience_counter".
nlohmann::json to_json(const EarlyStopping::State&);
/// Errors as above.
EarlyStopping::State early_stopping_from_json(const JsonObject&);

}  // namespace rz
