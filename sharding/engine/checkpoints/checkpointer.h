#pragma once
/// Saving and loading of an engine.

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "autograd_lite/nn/module.h"
#include "sharding/checkpoint/load_state.h"
#include "sharding/checkpoint/save_operation.h"
#include "sharding/data/loader_positions.h"
#include "sharding/engine/checkpoints/checkpoint_options.h"
#include "sharding/engine/checkpoints/engine_state.h"
#include "sharding/engine/loop/update_loop.h"
#include "sharding/parallel/world.h"
#include "sharding/strategy/strategy.h"

namespace rz {

/// The parts of an engine that a checkpoint has; they outlive the object.
struct CheckpointedParts {
  World& world;
  Module& module;
  Strategy& strategy;
  UpdateLoop* updates;  ///< null: inference
  std::shared_ptr<LoaderPositions> loaders;
  Stream stream;
  std::int64_t accumulation = 1;
  std::uint64_t seed = 0;
  std::string config = "{}";  ///< JSON
};

/// Makes checkpoints of these parts, one at a time, and restores them. Engine has the contracts.
class Checkpointer {
 public:
  explicit Checkpointer(CheckpointedParts, TrainerState = {});
  /// Completes a save in progress, unless an exception is on its way.
  ~Checkpointer();
  Checkpointer(const Checkpointer&) = delete;

  void save(const std::string& dir, const SaveCheckpointOptions&);
  std::optional<LoadedCheckpoint> load(const std::string& dir, const LoadCheckpointOptions&);
  /// Call after each update: advances a save in progress. Collective.
  void end_update();
  /// Waits for a save in progress. Collective.
  void wait();

  /// Keeps other processes from saving to a folder until the object ends; lock_checkpoint_folder(). One that
  /// cannot be written, or does not exist unless `make`, is left to save(), which does it too. Errc::io if a
  /// rank does not see the folder that rank 0 has locked. Collective.
  void lock(const std::string& dir, bool make);

  bool trains() const { return parts_.updates != nullptr; }
  /// Updates so far; 0 for inference.
  std::int64_t steps() const;
  /// Saved with each checkpoint, and restored with the updates.
  TrainerState& trainer() { return trainer_; }

 private:
  EngineState state() const;
  void check_seed(const EngineState&, const LoadCheckpointOptions&) const;
  TrainerState trainer_of(const EngineState&, const std::string& file) const;
  std::string describe_differences(const EngineState& saved, const StateLoader&) const;
  void check_optimizer(const OptimizerProgress&) const;
  /// `without_states`: parameters for which the count of updates begins anew.
  void restore(const EngineState&, const LoadCheckpointOptions&,
               const std::vector<std::string>& without_states);
  void check_base(const EngineState&, const TensorSource&, const LoadCheckpointOptions&,
                  const std::string& path) const;
  void restore_optimizer(const OptimizerProgress&, const std::vector<std::string>& without_states);

  CheckpointedParts parts_;
  TrainerState trainer_;
  SnapshotMemory snapshot_;
  std::map<std::string, std::shared_ptr<const void>> folder_locks_;  // by folder; null but on rank 0
  std::optional<SaveOperation> saving_;
};

}  // namespace rz
