#pragma once
/// Arguments of a run beside its DeepSpeed configuration: what "auto" stands for.

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "../../comm/core/types.h"

namespace rz {

/// Names, and defaults for "auto", are those of Hugging Face's TrainingArguments. An argument that is given
/// fills a key that the file leaves out, and must agree with one that the file has. An argument for which the
/// configuration has no key is an error.
struct TrainingArguments {
  std::optional<std::int64_t> train_batch_size;  ///< not in Hugging Face; "auto" is derived from the others
  std::optional<std::int64_t> per_device_train_batch_size;  ///< 8
  std::optional<std::int64_t> gradient_accumulation_steps;  ///< 1
  std::optional<double> learning_rate;                      ///< 5e-5
  std::optional<double> adam_beta1, adam_beta2;             ///< 0.9, 0.999
  std::optional<double> adam_epsilon;                       ///< 1e-8
  std::optional<double> weight_decay;                       ///< 0
  std::optional<double> max_grad_norm;                      ///< 1; 0: no clipping
  std::optional<std::int64_t> warmup_steps;                 ///< 0, which DeepSpeed's schedules take for 2
  std::optional<double>
      warmup_ratio;  ///< instead of warmup_steps: of the updates of the schedule, rounded up
  /// Adds a section "scheduler" without one: linear, cosine, constant, constant_with_warmup or
  /// reduce_lr_on_plateau. With a warm-up they are DeepSpeed's schedules, else torch's.
  std::optional<std::string> lr_scheduler_type;
  std::optional<std::int64_t> total_steps;  ///< updates that schedules count with; default: those of the run
  std::optional<DType> precision;           ///< fp16 and bf16 in Hugging Face; f32
  std::optional<bool> ddp_find_unused_parameters, ddp_static_graph, ddp_broadcast_buffers;
  std::optional<std::string> ddp_comm_hook;    ///< DdpConfig::CommHook; not in Hugging Face
  std::optional<bool> gradient_checkpointing;  ///< activation_checkpointing.partition_activations
  std::optional<bool> dataloader_drop_last;
  /// ringzero.mesh; 0: "auto". Accelerate: parallelism_config_{dp_replicate,dp_shard,tp}_size.
  std::optional<std::int64_t> mesh_replicate, mesh_shard, mesh_tp;
  std::optional<std::int64_t> logging_steps;  ///< steps_per_print
  /// Updates of the run, for "auto" in schedules, and the end of it for Engine::should_stop(); -1: as absent.
  std::optional<std::int64_t> max_steps;
  /// For the loop of the program, which makes as many passes over its loader, as train_lm does. An engine
  /// does not know the data: give max_steps, or EngineOptions::updates, to a schedule that needs the updates.
  std::optional<double> num_train_epochs;
  /// Adds ringzero.lora: names "q_proj,v_proj", "all-linear", or a regular expression. Names are those of
  /// TRL.
  std::optional<std::string> lora_target_modules;
  std::optional<std::int64_t> lora_r;
  std::optional<double> lora_alpha, lora_dropout;
  // ringzero.checkpoint
  std::optional<std::string> output_dir, resume_from_checkpoint;
  std::optional<std::int64_t> save_steps, save_minutes, save_total_limit;  ///< minutes: not in Hugging Face
  std::optional<std::string> save_strategy, eval_strategy;  ///< "no": 0 steps; "steps": 500 if not given
  std::optional<bool> async_save;                           ///< not in Hugging Face
  std::optional<std::int64_t> eval_steps, early_stopping_patience;
  std::optional<double> early_stopping_threshold;
  std::optional<std::string> metric_for_best_model;
  std::optional<bool> greater_is_better, load_best_model_at_end;
  std::string origin = "arguments";  ///< where they come from, for messages: "command line"
  /// Of arguments from flags, as they were typed, for messages: {"output_dir", "--checkpoint-dir"}.
  std::map<std::string, std::string> flags = {};
};

}  // namespace rz
