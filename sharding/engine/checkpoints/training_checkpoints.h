#pragma once
/// Checkpoints, evaluations and the end of a training run by the section "ringzero.checkpoint" of its
/// configuration (docs/configuration.md).
///
///     auto engine = rz::initialize(world, net, {.config = "ds.json"});  // resumes
///     while (engine.global_steps() < steps && !engine.should_stop()) {  // saves
///       engine.train_batch(loader, forward);
///       if (engine.checkpoints().should_evaluate())
///         engine.checkpoints().record({{"eval_loss", world.reduce(evaluate())}});
///     }
///     engine.checkpoints().finish();

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "checkpoint_options.h"

namespace rz {

class Checkpointer;
class World;
struct CheckpointConfig;

/// Decides after each update whether the run saves, and whether it stops. An Engine has one. Functions that
/// are collective have it in their comment. One thread per rank.
class TrainingCheckpoints {
 public:
  /// `file`: of the configuration, for messages. World and checkpointer outlive the object. With signals, it
  /// has the SignalHandler of the process: Errc::config if there is another. Collective.
  TrainingCheckpoints(World&, Checkpointer&, const CheckpointConfig&, std::string file);
  ~TrainingCheckpoints();
  TrainingCheckpoints(const TrainingCheckpoints&) = delete;

  /// Loads the checkpoint of resume_from_checkpoint; an engine has called it. A run that its launcher has
  /// started again goes on with the last one that it has saved itself, if there is one. A folder without a
  /// checkpoint is an error unless the key is true. Errc::config, "FILE:
  /// ringzero.checkpoint.resume_from_checkpoint: …", for what Engine::load_checkpoint() refuses, and
  /// "…output_dir: …" if another process saves to that folder. Collective.
  void resume();
  /// Without output_dir too, signals and the end of the allocation stop the run, as the keys have it:
  /// should_stop() then is true, and nothing is saved. For programs that save at their end. Call before the
  /// first should_stop(). Errc::config as the constructor. Collective.
  void stop_without_saving();
  /// What resume() has loaded.
  const std::optional<LoadedCheckpoint>& resumed() const;
  /// "resumed: DIR/TAG, after 100 updates"; empty if the run begins as it should. More lines have
  /// LoadedCheckpoint::differences and other checkpoints in output_dir, if there are any.
  std::string describe_resume() const;

  /// True after every eval_steps updates, until record(). A run that was stopped before record() is resumed
  /// with it.
  bool should_evaluate() const;
  /// Whether a signal or the end of the allocation stops the run: a long evaluation calls it between batches,
  /// ends early without record(), and calls should_stop(). Collective.
  bool stop_requested();
  /// The same between the micro-batches of an update, as a loop of backward() and step() with many of them
  /// may call it: `micro_batch` of them have taken `elapsed` on this rank. should_stop() then saves the state
  /// before the update in progress. About once a second; false until should_stop() has been called once.
  /// Collective.
  bool stop_requested_in_update(std::int64_t micro_batch, std::chrono::duration<double> elapsed);
  /// Call once after an update that was evaluated, before should_stop(). If the value of
  /// metric_for_best_model is the best one so far, should_stop() saves this update as the best checkpoint.
  /// Errc::config if the metric is missing, Errc::mismatch if the ranks have different values. Collective.
  void record(const Metrics&);
  /// Calls `f` at the end of each record(), on every rank.
  void on_record(std::function<void(const Metrics&)> f);

  /// Call after each update, when its metrics are recorded and logged, and before the first one. Saves if
  /// save_steps, save_minutes, a signal, the end of the allocation or a best value requires it. True if the
  /// run is to stop: decision() or early_stopped() has the reason. Further calls before the next update do
  /// nothing else. The first call makes output_dir, and is Errc::config if another process saves to it.
  /// Collective.
  bool should_stop();
  /// The last decision of should_stop() to save.
  const SaveDecision& decision() const;
  /// The number of updates of the last checkpoint that this run has begun to save or has loaded; 0: none.
  std::int64_t saved_steps() const;
  /// early_stopping_patience is exhausted.
  bool early_stopped() const;
  /// Call at the end of the run: saves the last update unless it is saved, waits for the save, and loads the
  /// model of the best checkpoint if load_best_model_at_end is set. Returns that checkpoint; none if no
  /// evaluation had a finite value. After a stop on request it only waits. Collective.
  std::optional<LoadedCheckpoint> finish();

  /// Values of the program's own that are saved with each checkpoint; after resume() those that were saved.
  ClientState& client_state();
  /// Texts that each checkpoint has as files: SaveCheckpointOptions::files.
  std::map<std::string, std::string>& files();
  /// SaveCheckpointOptions::nonfinite of each checkpoint; false at first.
  void save_nonfinite(bool);
  /// The best value so far.
  const BestMetric& best() const;
  const CheckpointConfig& config() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace rz
