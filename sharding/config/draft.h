#pragma once
/// A configuration while it is read: what its keys set.

#include <nlohmann/json.hpp>

#include "sharding/config/ds_config.h"
#include "sharding/optim/optimizers.h"

namespace rz::ds {

enum class Determinism { rank_order, world_size_invariant };

/// Values from which others follow, beside those that a key sets by itself. complete() derives the others.
struct Draft : DsConfig {
  std::string optimizer_type, schedule_type;
  OptimizerConfig optimizer_params;
  bool adam_w_mode = true, torch_adam = false;
  std::optional<double> muon_base_lr, muon_lr, adam_lr;  ///< null: not given
  bool half = false, brain = false;                      ///< fp16.enabled, bf16.enabled
  bool check_grad_overflow = true;
  std::optional<DType> grad_accum_dtype, param_dtype, autocast_dtype;
  bool autocasts = false;
  bool partition_activations = false, cpu_checkpointing = false;
  std::optional<std::int64_t> number_checkpoints;
  bool ignore_unused_parameters = true;
  std::optional<bool> find_unused_parameters, greater_is_better;
  Determinism deterministic = Determinism::rank_order;
  std::optional<std::int64_t> max_skipped;
  nlohmann::json resume = false;  ///< true, false or a folder
  LoraOptions lora_params;
  // What others call sizes of the mesh.
  std::int64_t autotp_size = 0, tp_size = 1, mics_shard_size = -1;
  std::optional<std::int64_t> data_parallel_size;
  nlohmann::json prof_ops = nlohmann::json::array();  ///< of comms_logger: a list of texts
  nlohmann::json target_modules, modules_to_save;     ///< of ringzero.lora: lists of texts, or a text
  /// torch's OneCycleLR: the first, or the product of the others.
  std::optional<std::int64_t> total_steps, epochs, steps_per_epoch;
};

}  // namespace rz::ds
