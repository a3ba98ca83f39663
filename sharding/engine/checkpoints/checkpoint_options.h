#pragma once
/// Options and results of the checkpoints of an engine, with the names of DeepSpeed: of save_checkpoint(),
/// load_checkpoint() and TrainingCheckpoints.

#include <csignal>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace rz {

/// A program's own values in a checkpoint.
using ClientValue = std::variant<bool, std::int64_t, double, std::string>;
/// As client_state of DeepSpeed: {{"epoch", 3}, {"best_loss", 0.5}, {"dataset", "wiki"}}. Numbers come back
/// with the same bits.
using ClientState = std::map<std::string, ClientValue>;

struct SaveCheckpointOptions {
  std::string tag;           ///< name of the checkpoint; empty: "global_stepN" after N updates
  ClientState client_state;  ///< values of the program's own; those of rank 0 are saved
  /// Copies the state and returns; threads write it while training goes on. Engine::wait_for_checkpoint()
  /// waits for them, as does the next save.
  bool async = false;
  /// Keeps the last so many checkpoints with tags of this form, and removes older ones; 0: removes none.
  std::size_t save_total_limit = 0;
  /// Texts that rank 0 writes into the checkpoint's folder, by file name: {{"config.json", …}}, which
  /// `checkpoint merge` copies.
  std::map<std::string, std::string> files;
  /// DIR/best names it, in place of another, once it is complete; save_total_limit does not remove it.
  bool best = false;
  /// Leaves out parameters that are not trained, as the model that an adapter is for, and records the name of
  /// the file or folder that they were loaded from. A module that has loaded them from one of this name loads
  /// the checkpoint; they keep their values.
  bool exclude_frozen_parameters = false;
  /// Saves parameters and optimizer states that are not finite too, instead of Errc::diverged.
  bool nonfinite = false;
};

struct LoadCheckpointOptions {
  std::string tag;  ///< empty: the one that DIR/latest names; "best": that of DIR/best
  /// false: what the checkpoint lacks gets initial values, and what the model lacks is not read; updates of a
  /// parameter without states are counted from 0 on; frozen weights that it leaves out may be others than
  /// those that it was trained with. A checkpoint of which nothing is in the model is refused all the same.
  bool load_module_strict = true;
  bool load_optimizer_states = true;  ///< which are those of an optimizer of the same name
  bool load_module_only = false;      ///< the values of the model, and nothing else
  /// Reads every byte once before anything is loaded, the files shared out among the ranks, and compares
  /// checksums.
  bool verify = true;
};

struct LoadedCheckpoint {
  std::string path;  ///< DIR/TAG
  std::string tag;
  std::int64_t steps = 0;  ///< updates before it was saved
  ClientState client_state;
  /// "optimizer.params.lr: 0.001, now 0.01; …": settings that decide on the course of the run, as the
  /// checkpoint and as this engine has them; empty if there is no difference. Those of the engine hold.
  /// States that only one of both has are named too: "optimizer/max_exp_avg_sq: absent, now starts from
  /// exp_avg_sq".
  std::string differences;
  /// Parameters and buffers of the model that the checkpoint lacks, and the reverse; empty if loading was
  /// strict.
  std::vector<std::string> missing_keys{}, unexpected_keys{};
};

// ---- decisions of TrainingCheckpoints

/// The exit status of a program that stops on request, as if SIGTERM had ended it. Launchers do not mistake
/// the run for a finished one, and rzrun does not restart it.
inline constexpr int stopped_exit_status = 128 + SIGTERM;

enum class SaveReason { none, save_steps, save_interval, user1, interrupt, terminate, allocation_end };

/// Equal on all ranks.
struct SaveDecision {
  SaveReason reason = SaveReason::none;  ///< of several the last one in the order of SaveReason
  int rank = 0;                          ///< the lowest one with that reason

  bool saves() const { return reason != SaveReason::none; }
  bool stops() const { return reason >= SaveReason::interrupt; }
  bool operator==(const SaveDecision&) const = default;
};

/// "SIGUSR1 on rank 3"; empty for none.
std::string describe(const SaveDecision&);

/// Results of an evaluation by name: "eval_loss", "eval_accuracy". Equal on all ranks.
using Metrics = std::map<std::string, double>;

/// As best_metric, best_global_step and best_model_checkpoint of Hugging Face's TrainerState.
struct BestMetric {
  bool greater_is_better = false;  ///< false for a loss
  std::optional<double> value;     ///< empty before the first finite value
  std::uint64_t step = 0;          ///< the number of updates when it was measured
  std::string tag;                 ///< of the checkpoint that has it

  /// Keeps the value if it is the best so far; true if it is. Of equal values the first stays.
  bool update(double metric, std::uint64_t at_step, const std::string& checkpoint_tag);
  bool operator==(const BestMetric&) const = default;
};

}  // namespace rz
