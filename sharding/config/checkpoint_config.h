#pragma once
/// The section "ringzero.checkpoint": when a run is saved, evaluated and stopped.

#include <cstdint>
#include <optional>
#include <string>

namespace rz {

/// Names and rules are those of Hugging Face's TrainingArguments and EarlyStoppingCallback, where they have
/// them. docs/configuration.md describes the keys.
struct CheckpointConfig {
  std::string output_dir;  ///< absent: the folder of resume_from_checkpoint; empty: nothing is saved
  std::int64_t save_steps = 0, save_minutes = 0, save_total_limit = 0;
  bool async_save = false;
  bool signals = true, stop_before_allocation_end = true;
  std::int64_t allocation_margin = 120;  ///< seconds
  std::string resume_from_checkpoint;    ///< a folder; output_dir for true; empty: the run starts afresh
  bool resume_required = false;          ///< not for true: a folder without a checkpoint is an error
  std::int64_t eval_steps = 0;
  std::string metric_for_best_model = "eval_loss";  ///< begins with "eval_"
  bool greater_is_better = false;
  bool load_best_model_at_end = false;
  std::optional<std::int64_t> early_stopping_patience;
  double early_stopping_threshold = 0;

  bool saves() const { return !output_dir.empty(); }
  bool operator==(const CheckpointConfig&) const = default;
};

}  // namespace rz
