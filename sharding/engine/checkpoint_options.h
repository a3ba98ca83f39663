#pragma once
/// Options of Engine::save_checkpoint() and Engine::load_checkpoint(), with the names of DeepSpeed.

#include <cstddef>
#include <cstdint>
#include <map>
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
  /// Saves parameters and optimizer states that are not finite too, instead of Errc::diverged.
  bool nonfinite = false;
};

struct LoadCheckpointOptions {
  std::string tag;  ///< empty: the one that DIR/latest names; "best": that of DIR/best
  /// false: what the checkpoint lacks gets initial values, and what the model lacks is not read; updates of a
  /// parameter without states are counted from 0 on. A checkpoint of which nothing is in the model is refused
  /// all the same.
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

}  // namespace rz
