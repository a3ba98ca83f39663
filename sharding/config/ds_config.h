#pragma once
/// A DeepSpeed configuration, with the names, defaults and rules of DeepSpeed 0.19: JSON with comments,
/// trailing commas and integers like 1e9; numbers, and true and false, may be in quotes.
/// docs/configuration.md lists every key and what is done with it. An unknown key, a duplicate key and a key
/// that needs what this build does not have are errors; no key that changes results or memory is passed over
/// in silence. Options that DeepSpeed has no key for are under "ringzero".
///
///     const DsConfig config = read_ds_config("ds.json", {.learning_rate = 1e-3}, {.ranks = 8});
///     std::puts(resolved_table(config).c_str());

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "sharding/config/batch.h"
#include "sharding/config/checkpoint_config.h"
#include "sharding/config/ddp_config.h"
#include "sharding/config/lr_schedule.h"
#include "sharding/config/training_arguments.h"
#include "sharding/optim/loss_scaler.h"
#include "sharding/optim/precision.h"
#include "sharding/optim/unused_parameters.h"

namespace rz {

/// The section "optimizer". Fields that a type does not have keep the values below.
struct OptimizerConfig {
  enum class Type { adam, adamw, sgd, adagrad, rmsprop, lion, lamb, muon };
  Type type = Type::adamw;  ///< "Adam" is adamw, unless adam_w_mode is false
  double lr = 1e-3;
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8;  ///< where the type has them
  double momentum = 0;                            ///< SGD, RMSprop, Muon
  bool nesterov = false;                          ///< SGD
  double dampening = 0;                           ///< SGD
  double weight_decay = 0;      ///< decoupled in AdamW, Lion and Muon, else as the type defines it
  bool bias_correction = true;  ///< Adam, AdamW, Lamb
  bool amsgrad = false;         ///< Adam, AdamW
  bool maximize = false;        ///< Adam, AdamW, SGD, Adagrad, RMSprop
  double lr_decay = 0, initial_accumulator_value = 0;  ///< Adagrad
  double alpha = 0.99;                                 ///< RMSprop
  bool centered = false;                               ///< RMSprop
  double min_coeff = 0.01, max_coeff = 10;             ///< Lamb: bounds of the trust ratio
  bool eps_inside_sqrt = false;                        ///< Lamb
  double muon_lr = 0.02, adam_lr = 3e-4;               ///< Muon: rates of matrices and of the rest
  std::string ns_method = "gram";                      ///< Muon: "gram" or "standard"
  bool operator==(const OptimizerConfig&) const = default;
};
/// "Adam", "AdamW", "SGD", "Adagrad", "RMSprop", "Lion", "Lamb", "Muon".
const char* name(OptimizerConfig::Type);

/// Sections "fp16", "bf16", "data_types" and "torch_autocast", and keys about the reduction of gradients.
struct PrecisionConfig {
  DType parameters = DType::f32;       ///< fp16.enabled, bf16.enabled
  DType gradients = DType::f32;        ///< data_types.grad_accum_dtype, or that of the parameters
  std::optional<DType> communication;  ///< communication_data_type; absent: that of the gradients
  bool auto_cast = false;              ///< fp16: convert floating-point inputs
  std::optional<DType> autocast;       ///< torch_autocast: for Tape::set_autocast()
  LossScaleOptions loss_scale;         ///< fp16, and an autocast to f16
  bool skip_overflow = false;  ///< of a scaled loss, or bf16.check_grad_overflow: skip an update not finite
  bool prescale_gradients = false;
  double gradient_predivide_factor = 1;
  /// True if gradients in f16 need a scaled loss.
  bool scales_loss() const { return parameters == DType::f16 || autocast == DType::f16; }
  bool operator==(const PrecisionConfig&) const = default;
};

/// Sections "offload_param" and "offload_optimizer".
struct OffloadConfig {
  enum class Device { none, cpu, nvme };
  Device device = Device::none;
  bool pin_memory = true;
  double ratio = 1;  ///< of the optimizer's state
  bool operator==(const OffloadConfig&) const = default;
};

/// The section "zero_optimization". Sizes are in elements.
struct ZeroConfig {
  int stage = 0;
  std::optional<std::int64_t> reduce_bucket_size;
  std::int64_t allgather_bucket_size = 500'000'000;
  std::optional<bool> overlap_comm;  ///< absent: DeepSpeed overlaps at stage 3 only
  bool round_robin_gradients = false, ignore_unused_parameters = true;
  std::int64_t sub_group_size = 1'000'000'000;
  OffloadConfig offload_param, offload_optimizer;
  std::int64_t prefetch_bucket_size = 50'000'000;
  std::int64_t param_persistence_threshold = 100'000, model_persistence_threshold = INT64_MAX;
  std::int64_t max_live_parameters = 1'000'000'000, max_reuse_distance = 1'000'000'000;
  bool gather_16bit_weights_on_model_save = false;
  bool operator==(const ZeroConfig&) const = default;
};

struct ActivationCheckpointingConfig {
  bool partition_activations = false, cpu_checkpointing = false;
  std::optional<std::int64_t> number_checkpoints;
  /// True if blocks shall compute their activations again in backward.
  bool enabled() const {
    return partition_activations || cpu_checkpointing || number_checkpoints.has_value();
  }
  bool operator==(const ActivationCheckpointingConfig&) const = default;
};

/// Logs and files.
struct MonitorConfig {
  std::optional<std::int64_t> steps_per_print;
  bool wall_clock_breakdown = false, memory_breakdown = false, dump_state = false;
  bool csv_enabled = false;  ///< csv_monitor
  std::string csv_output_path, csv_job_name = "DeepSpeedJobName";
  enum class TagValidation { warn, ignore, fail };
  TagValidation tag_validation = TagValidation::warn;  ///< checkpoint
  bool operator==(const MonitorConfig&) const = default;
};

/// A value of the resolved configuration.
struct ResolvedSetting {
  std::string path;    ///< "zero_optimization.stage"
  std::string value;   ///< JSON
  std::string origin;  ///< "file", "default", "auto: …", "learning_rate (command line)", "file, as OLD.KEY"
  bool shown = false;  ///< in resolved_table(): it was given, or it is applied and its section is in use
};

struct DsConfig {
  std::string file;  ///< path, for messages
  BatchConfig batch;
  BatchSizes sizes;                          ///< zeros if neither train nor micro batch size was given
  std::optional<OptimizerConfig> optimizer;  ///< none without a section: inference
  LrSchedule schedule;                       ///< ConstantLr without a section "scheduler"
  PrecisionConfig precision;
  ZeroConfig zero;
  DdpConfig ddp;                ///< ringzero
  CheckpointConfig checkpoint;  ///< ringzero.checkpoint
  ActivationCheckpointingConfig activation_checkpointing;
  MonitorConfig monitor;
  /// ringzero: as many updates in a row whose gradients are not finite are an error; 0: any number may be.
  std::int64_t max_skipped_updates = 50;
  double gradient_clipping = 1;  ///< limit of the global norm; 0: no clipping
  bool drop_last = false;        ///< dataloader_drop_last
  /// ringzero.deterministic: the same bits for 1, 2, 4, … ranks that share the micro-batches of an update.
  bool world_size_invariant = false;
  UnusedParameterPolicy unused_parameters = UnusedParameterPolicy::pytorch;  ///< ringzero.unused_parameters
  std::vector<ResolvedSetting> settings;  ///< every value that was read, in the order of the tables
  std::vector<std::string> warnings;      ///< one line each
};

/// Errors are Errc::config, "FILE: key.path: reason; remedy", or Errc::unsupported for what this build does
/// not have. One error has all that is wrong, a line each, at most 20: unknown keys, wrong values, what is
/// not supported, and combinations. An error of syntax comes alone. Batch sizes may be missing, but sizes
/// that are given must divide.
DsConfig read_ds_config(const std::string& path, const TrainingArguments& = {}, const RunFacts& = {});
DsConfig parse_ds_config(std::string_view text, const std::string& file, const TrainingArguments& = {},
                         const RunFacts& = {});

/// The sizes. Errc::config if neither train_batch_size nor train_micro_batch_size_per_gpu was given.
BatchSizes required_sizes(const DsConfig&);

/// The resolved configuration as JSON, which parse_ds_config accepts and reads as an equal configuration.
std::string resolved_json(const DsConfig&);
/// The same for people: a line for each value that was given or is applied, with its origin.
std::string resolved_table(const DsConfig&);

/// docs/configuration.md: every key, its default, and what is done with it.
std::string configuration_document();

}  // namespace rz
