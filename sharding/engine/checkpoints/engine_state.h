#pragma once
/// What a checkpoint of an engine has besides tensors, and its JSON.

#include <cstdint>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/bootstrap.h"
#include "sharding/config/ds_config.h"
#include "sharding/data/loader_positions.h"
#include "sharding/engine/checkpoints/checkpoint_options.h"
#include "sharding/engine/checkpoints/early_stopping.h"
#include "sharding/engine/loop/update_loop.h"
#include "sharding/io/json.h"

namespace rz {

/// An optimizer without its states.
struct OptimizerProgress {
  std::string name;
  std::int64_t updates = 0;
  struct Group {
    std::string name;
    double base_lr = 0;  ///< of the configuration
    double lr = 0;       ///< at the time, by hand or by the schedule
    bool operator==(const Group&) const = default;
  };
  std::vector<Group> groups;
  std::map<std::string, std::int64_t> missed_updates;  ///< by parameter, where it is not 0
  bool operator==(const OptimizerProgress&) const = default;
};

struct EngineState {
  std::string strategy;           ///< name; for people
  std::vector<std::string> jobs;  ///< jobs_of_launchers() of the run that has saved it
  int ranks = 1;
  std::int64_t accumulation = 1;
  std::uint64_t seed = 0;
  UpdateLoop::State updates;
  OptimizerProgress optimizer;
  LoaderPositions::ByName loaders;
  std::string config = "{}";    ///< JSON, resolved
  bool without_frozen = false;  ///< parameters that were not trained are not in it
  /// Names of the files or folders that these were loaded from; empty: none. Absent in old checkpoints.
  std::optional<std::vector<std::string>> base{};
  std::string adapter{};             ///< JSON: adapter_state() of a model with LoRA
  std::string trainer_state = "{}";  ///< JSON of a TrainerState; empty object: none was saved
  ClientState client_state;
};

/// The jobs of launchers that this process belongs to, "run 1234" of rzrun or torchrun and "slurm job 5678".
/// They keep their names when the launcher starts the job again.
struct LauncherJob {
  std::string name;
  bool restarted = false;
};
std::vector<LauncherJob> jobs_of_launchers();
/// The same with variables from another source than the process environment.
std::vector<LauncherJob> jobs_of_launchers_from(const Variables&);

/// LoadedCheckpoint::differences, in one line: of batches, optimizer, rates, schedule, clipping and
/// precision. With other ranks, batches and accumulation may differ as long as an update has the same
/// samples.
std::string differences(const EngineState& saved, const EngineState& now);

/// JSON object: CheckpointIndex::state.
std::string to_json(const EngineState&);
/// Errc::config, "FILE: key.path: …".
EngineState parse_engine_state(std::string_view text, const std::string& file);

// ---- what decides on the best checkpoint and on early stopping

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
