#pragma once
/// A DeepSpeed configuration, with the names, defaults and rules of DeepSpeed 0.19: JSON with comments,
/// trailing commas and integers like 1e9; numbers, and true and false, may be in quotes.
/// docs/configuration.md lists every key and what is done with it. An unknown key, a duplicate key and a key
/// that needs what this build does not have are errors; no key that changes results or memory is passed over
/// in silence. Options that DeepSpeed has no key for are under "ringzero".
///
///     const DsConfig config = read_ds_config("ds.json", {.learning_rate = 1e-3}, {.ranks = 8});
///     std::puts(resolved_table(config).c_str());

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "../../autograd_lite/models/lora.h"
#include "../model/options.h"
#include "../optim/loss_scaler.h"
#include "../parallel/mesh.h"
#include "lr_schedule.h"
#include "training_arguments.h"

namespace rz {

class Optimizer;

/// The sizes that were given.
struct BatchConfig {
  std::optional<std::int64_t> train;         ///< train_batch_size: samples of an update
  std::optional<std::int64_t> micro;         ///< train_micro_batch_size_per_gpu: samples of a pass on a rank
  std::optional<std::int64_t> accumulation;  ///< gradient_accumulation_steps: passes of an update
  bool operator==(const BatchConfig&) const = default;
};

/// All positive; train = micro × accumulation × ranks with data of their own (MeshSizes::data()).
struct BatchSizes {
  std::int64_t train = 0, micro = 0, accumulation = 0;
  bool operator==(const BatchSizes&) const = default;
};

/// What a configuration cannot know.
struct RunFacts {
  int ranks = 1;                            ///< all of the run
  int ranks_per_node = 0;                   ///< 0: unknown, or nodes have different numbers
  std::optional<std::int64_t> hidden_size;  ///< of the model; sizes of buckets follow from it
  /// Number of updates of the run at these batch sizes; empty: unknown.
  std::function<std::int64_t(const BatchSizes&)> updates = {};
  /// Without a section "optimizer": AdamW from the arguments, as Hugging Face's Trainer has it; else none.
  bool adamw_by_default = false;
};

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
  bool operator==(const OptimizerConfig&) const = default;
};
/// "Adam", "AdamW", "SGD", "Adagrad", "RMSprop", "Lion", "Lamb", "Muon".
const char* name(OptimizerConfig::Type);

/// Parameters to which weight decay applies.
enum class Decay {
  all,      ///< one group of all parameters, as in DeepSpeed
  matrices  ///< two groups: parameters of two or more dimensions, and the rest without decay
};
/// Muon has two groups of its own. Errc::invalid_argument names an option that is out of range.
std::unique_ptr<Optimizer> make_optimizer(const OptimizerConfig&, Decay);

/// Sections "fp16" and "torch_autocast"; StrategyOptions::precision has the types of a model.
struct PrecisionConfig {
  std::optional<DType> autocast;  ///< torch_autocast: for Tape::set_autocast()
  LossScaleOptions loss_scale;    ///< fp16, and an autocast to f16
  bool skip_overflow = false;  ///< of a scaled loss, or bf16.check_grad_overflow: skip an update not finite
  bool operator==(const PrecisionConfig&) const = default;
};

/// The section "ringzero.join": arguments of PyTorch's DistributedDataParallel.join().
struct JoinConfig {
  bool enable = true, divide_by_initial_world_size = true, throw_on_early_termination = false;
  bool operator==(const JoinConfig&) const = default;
};

/// What StrategyOptions has no place for; names are those of PyTorch's DistributedDataParallel, and of
/// DistributedDataParallelKwargs in Hugging Face's Accelerate.
struct DdpConfig {
  enum class CommHook { no, fp16, bf16, power_sgd, batched_power_sgd };
  CommHook comm_hook = CommHook::no;
  PowerSgdOptions comm_state_option;  ///< of the two PowerSGD hooks
  JoinConfig join;
  bool operator==(const DdpConfig&) const = default;
};
/// "no", "fp16", "bf16", "power_sgd", "batched_power_sgd".
const char* name(DdpConfig::CommHook);

/// The section "ringzero.checkpoint": when a run is saved, evaluated and stopped. Names and rules are those
/// of Hugging Face's TrainingArguments and EarlyStoppingCallback, where they have them. docs/configuration.md
/// describes the keys.
struct CheckpointConfig {
  std::string output_dir;  ///< absent: the folder of resume_from_checkpoint; empty: nothing is saved
  std::int64_t save_steps = 0, save_minutes = 0, save_total_limit = 0;
  bool async_save = false;
  bool exclude_frozen_parameters = false;
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

/// Logs and files.
struct MonitorConfig {
  std::optional<std::int64_t> steps_per_print;
  bool wall_clock_breakdown = false, memory_breakdown = false;
  bool csv_enabled = false;  ///< csv_monitor
  std::string csv_output_path, csv_job_name = "DeepSpeedJobName";
  bool tensorboard_enabled = false;
  std::string tensorboard_output_path, tensorboard_job_name = "DeepSpeedJobName";
  bool comms_enabled = false, comms_verbose = false;  ///< comms_logger
  bool comms_prof_all = true;
  std::vector<std::string> comms_prof_ops;  ///< without prof_all: what the logged operations begin with
  bool operator==(const MonitorConfig&) const = default;
};

/// The section "flops_profiler".
struct FlopsProfilerConfig {
  bool enabled = false;
  std::int64_t profile_step = 1;   ///< number of the update, from 0
  std::int64_t module_depth = -1;  ///< of the report; the whole has depth 0; -1: any
  std::int64_t top_modules = 1;    ///< the largest of each depth
  bool detailed = true;            ///< the report has a table of all modules
  std::string output_file;         ///< in place of the log; empty: the log
  bool operator==(const FlopsProfilerConfig&) const = default;
};

/// ringzero.trace: a timeline of updates.
struct TraceConfig {
  std::string path;                        ///< of the file; empty: none
  std::int64_t first_step = 4, steps = 2;  ///< updates of this process, from 1 on
  bool operator==(const TraceConfig&) const = default;
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
  /// ringzero.mesh, and keys of others with its meaning, for RunFacts::ranks; without such a key the default,
  /// which fits any number of ranks.
  MeshSizes mesh;
  bool sequence_parallel = false;  ///< ParallelOptions::sequence_parallel
  BatchConfig batch;
  BatchSizes sizes;                          ///< zeros if neither train nor micro batch size was given
  std::optional<OptimizerConfig> optimizer;  ///< none without a section: inference
  LrSchedule schedule;                       ///< ConstantLr without a section "scheduler"
  PrecisionConfig precision;
  int stage = 0;  ///< zero_optimization.stage
  /// What keys of all sections set, with DeepSpeed's defaults. strategy_options() fits it to a kind.
  StrategyOptions strategy{.allgather_bucket_size = 500'000'000, .gathers = deepspeed_gather_limits};
  DdpConfig ddp;                        ///< ringzero
  CheckpointConfig checkpoint;          ///< ringzero.checkpoint
  std::optional<LoraOptions> lora;      ///< ringzero.lora: an engine calls add_lora()
  bool checkpoint_activations = false;  ///< blocks compute their activations again in backward
  MonitorConfig monitor;
  FlopsProfilerConfig flops_profiler;
  TraceConfig trace;  ///< ringzero.trace
  /// ringzero: as many updates in a row whose gradients are not finite are an error; 0: any number may be.
  std::int64_t max_skipped_updates = 50;
  double gradient_clipping = 1;  ///< limit of the global norm; 0: no clipping
  bool drop_last = false;        ///< dataloader_drop_last
  /// ringzero.deterministic: the same bits for 1, 2, 4, … ranks that share the micro-batches of an update.
  bool world_size_invariant = false;
  std::vector<ResolvedSetting> settings;  ///< every value that was read, in the order of the tables
  std::vector<std::string> warnings;      ///< one line each

  /// True if gradients in f16 need a scaled loss.
  bool scales_loss() const {
    return strategy.precision.parameters == DType::f16 || precision.autocast == DType::f16;
  }
};

/// Errors are Errc::config, "FILE: key.path: reason; remedy", or Errc::unsupported for what this build does
/// not have. One error has all that is wrong, a line each, at most 20: unknown keys, wrong values, what is
/// not supported, and combinations. An error of syntax comes alone. Batch sizes may be missing, but sizes
/// that are given must divide.
DsConfig read_ds_config(const std::string& path, const TrainingArguments& = {}, const RunFacts& = {});
DsConfig parse_ds_config(std::string_view text, const std::string& file, const TrainingArguments& = {},
                         const RunFacts& = {});

/// The configuration of an engine or a program: a path, or text that begins with '{', which errors name
/// `text_name`. Empty: that of RZ_CONFIG, in the same form; without that "{}".
DsConfig find_ds_config(const std::string& config, const std::string& text_name,
                        const TrainingArguments& = {}, const RunFacts& = {});

/// The sizes. Errc::config if neither train_batch_size nor train_micro_batch_size_per_gpu was given.
BatchSizes required_sizes(const DsConfig&);

/// The resolved configuration as JSON, which parse_ds_config accepts and reads as an equal configuration.
std::string resolved_json(const DsConfig&);
/// The same for people: a line for each value that was given or is applied, with its origin.
std::string resolved_table(const DsConfig&);

/// docs/configuration.md: every key, its default, and what is done with it.
std::string configuration_document();

}  // namespace rz
