// Keys that DeepSpeed does not have.

#include "sharding/config/keys.h"

namespace rz::ds {
namespace {

using enum Kind;

constexpr KeySpec ringzero[] = {
    applied<&Draft::deterministic>(
        "deterministic",
        "rank_order: the same bits for every strategy at a number of ranks; world_size_invariant: also for "
        "1, 2, 4, 8, … ranks, at the same train_batch_size and train_micro_batch_size_per_gpu; "
        "docs/guide/determinism.md")
        .one_of("[\"rank_order\", \"world_size_invariant\"]"),
    applied<&StrategyOptions::unused_parameters>(
        "unused_parameters",
        "a parameter that no loss reaches: pytorch skips its update, deepspeed updates it with a zero "
        "gradient")
        .one_of("[\"pytorch\", \"deepspeed\"]"),
    applied<&Draft::find_unused_parameters>(
        "find_unused_parameters",
        "false: a parameter that no loss reaches on some rank is an error, with names and ranks; null: "
        "zero_optimization.ignore_unused_parameters decides")
        .from("ddp_find_unused_parameters"),
    applied<&StrategyOptions::static_graph>(
        "static_graph",
        "the gradients of every update, and their order, are those of the first, or it is an error")
        .from("ddp_static_graph"),
    applied<&StrategyOptions::broadcast_buffers>(
        "broadcast_buffers",
        "buffers are those of rank 0 in every forward pass that trains; false: each rank has its own")
        .from("ddp_broadcast_buffers"),
    applied<&DdpConfig::comm_hook>(
        "comm_hook",
        "stage 0: what forms the means of gradients: no (all_reduce), fp16 or bf16 (rounded to 16 bits), "
        "power_sgd, batched_power_sgd")
        .one_of("[\"no\", \"fp16\", \"bf16\", \"power_sgd\", \"batched_power_sgd\"]")
        .from("ddp_comm_hook"),
    applied<&Draft::max_skipped>(
        "max_skipped_updates",
        "so many updates in a row that are skipped, because gradients are not finite or no target counts, "
        "are an error (Errc::diverged); 0: any number; null: 50, but with a dynamic loss scale of fp16 any "
        "number, until min_loss_scale")
        .within(0, 0x1p53),
    section("mesh", "{}", "ranks that copy, divide and share the layers of a model"),
    applied<&DsConfig::sequence_parallel>("sequence_parallel",
                                          "between the layers that ranks of mesh.tp share, each of them has "
                                          "a range of the tokens, whose number "
                                          "tp divides; no effect without tp"),
    section("comm_state_option", "null", "of power_sgd and batched_power_sgd"),
    refused("comm_wrapper", "\"no\"", "[\"no\"]",
            "hooks are not wrapped; comm_hook fp16 and bf16 send 16 bits"),
    section("join", "null", "of Engine::Join: ranks with different numbers of batches"),
    section("lora", "null", "a frozen model with trainable low-rank updates; docs/guide/lora.md"),
    section("checkpoint", "{}", "checkpoints, evaluation, early stopping; docs/guide/checkpoints.md"),
    section("trace", "{}", "a timeline of updates for Perfetto and chrome://tracing"),
    accepted("gradient_as_bucket_view", "false", "gradients always are parts of buckets"),
};

constexpr double max_mesh_size = 1 << 20;

constexpr KeySpec mesh[] = {
    applied<&MeshSizes::replicate>(
        "replicate",
        "copies of the model, each divided over `shard` ranks: HSDP, MiCS; \"auto\" "
        "or 0: what the others leave")
        .within(0, max_mesh_size)
        .from("mesh_replicate"),
    applied<&MeshSizes::shard>("shard",
                               "ranks between which values, gradients and optimizer state are divided, as "
                               "zero_optimization.stage has it; \"auto\" or 0: what the others leave")
        .within(0, max_mesh_size)
        .from("mesh_shard"),
    applied<&MeshSizes::tp>(
        "tp",
        "neighbouring ranks that share each layer and have the same data; of two \"auto\" the inner one, of "
        "replicate, shard, tp in this order, fills a node")
        .within(0, max_mesh_size)
        .from("mesh_tp"),
};

constexpr KeySpec comm_state_option[] = {
    applied<&PowerSgdOptions::matrix_approximation_rank>("matrix_approximation_rank",
                                                         "columns of the factors of a gradient")
        .within(1, 1 << 16),
    applied<&PowerSgdOptions::start_iter>("start_powerSGD_iter",
                                          "passes that are reduced whole before compression begins")
        .within(2, 0x1p62),
    applied<&PowerSgdOptions::min_compression_rate>(
        "min_compression_rate",
        "a gradient is compressed if it has more than this many times the elements of its factors")
        .within(1e-300, unbounded),
    applied<&PowerSgdOptions::use_error_feedback>("use_error_feedback",
                                                  "adds what compression has lost to the next gradients"),
    applied<&PowerSgdOptions::warm_start>("warm_start", "starts from the factor of the pass before"),
    applied<&PowerSgdOptions::random_seed>("random_seed", "of the first factor").within(0, 0x1p53),
    refused("orthogonalization_epsilon", "0", "[0, 1e-8]", "columns are orthogonalised with 1e-8"),
    accepted("compression_stats_logging_frequency", "10000",
             "Engine::strategy().logging_data() has the traffic"),
    accepted("batch_tensors_with_same_shape", "false", "results do not depend on it"),
};

constexpr KeySpec join[] = {
    applied<&JoinConfig::enable>("enable",
                                 "false: ranks must have equally many batches, and do not exchange it"),
    applied<&JoinConfig::divide_by_initial_world_size>(
        "divide_by_initial_world_size",
        "losses without terms: means divide by the number of all ranks; false: of those that have data"),
    applied<&JoinConfig::throw_on_early_termination>(
        "throw_on_early_termination", "an error on all ranks where one runs out of data, which is named"),
};

constexpr KeySpec trace[] = {
    applied<&TraceConfig::path>("path",
                                "a file of JSON with computation, collectives, waits and memory of all "
                                "ranks, complete after the last of these updates; empty: none"),
    applied<&TraceConfig::first_step>("first_step", "the first update, counted from 1 in this process")
        .within(1, 0x1p53),
    applied<&TraceConfig::steps>("steps", "number of updates").within(1, 1000),
};

constexpr const char* not_here = "not supported in this build yet";

// Names, defaults and meaning are those of PEFT's LoraConfig.
constexpr KeySpec lora[] = {
    applied<&Draft::target_modules>(
        "target_modules",
        "names of Linear layers, or their ends, [\"q_proj\", \"v_proj\"]; or a regular expression of whole "
        "names; or \"all-linear\": all but the head; null: those of PEFT for the family of the model")
        .from("lora_target_modules"),
    applied<&LoraOptions::r>("r", "rank of the updates").within(1, 1 << 20).from("lora_r"),
    applied<&LoraOptions::lora_alpha>("lora_alpha", "updates are multiplied by lora_alpha / r")
        .within(1e-30, unbounded)
        .from("lora_alpha"),
    applied<&LoraOptions::lora_dropout>("lora_dropout", "of the input of an update, in training")
        .within(0, 0.999999)
        .from("lora_dropout"),
    applied<&LoraOptions::use_rslora>("use_rslora", "updates are multiplied by lora_alpha / sqrt(r)"),
    applied<&Draft::modules_to_save>("modules_to_save",
                                     "ends of names of modules that are trained whole and saved with the "
                                     "adapter, with their buffers; null: "
                                     "none"),
    refused("bias", "\"none\"", "[\"none\"]", "biases stay frozen"),
    refused("init_lora_weights", "true", "[true]", "A begins as PyTorch's Linear, B with 0"),
    refused("use_dora", "false", "[false, null]", not_here),
    refused("lora_bias", "false", "[false, null]", not_here),
    refused("rank_pattern", "{}", "[{}, null]", "all layers have one r"),
    refused("alpha_pattern", "{}", "[{}, null]", "all layers have one lora_alpha"),
    refused("layers_to_transform", "null", "[null]",
            "name the layers in target_modules: \"layers.0.mlp.up_proj\""),
    refused("layers_pattern", "null", "[null, []]", "name the layers in target_modules"),
    refused("exclude_modules", "null", "[null, []]", "name the layers in target_modules"),
    refused("layer_replication", "null", "[null]", not_here),
    refused("target_parameters", "null", "[null, []]", not_here),
    refused("trainable_token_indices", "null", "[null]", not_here),
    accepted("fan_in_fan_out", "false", "follows from the layer: true for Conv1D of GPT-2"),
    accepted("task_type", "null"),
    accepted("peft_type", "\"LORA\""),
    accepted("base_model_name_or_path", "null"),
    accepted("inference_mode", "false"),
};

constexpr KeySpec checkpoint[] = {
    applied<&CheckpointConfig::output_dir>(
        "output_dir", "folder of the checkpoints, shared by all ranks; empty: none are saved")
        .from("output_dir"),
    applied<&CheckpointConfig::save_steps>("save_steps", "save every so many updates; 0: not by number")
        .within(0, 0x1p53)
        .from("save_steps"),
    applied<&CheckpointConfig::save_minutes>(
        "save_minutes", "save when the last checkpoint is so many minutes old; 0: not by time")
        .within(0, 0x1p31)
        .from("save_minutes"),
    applied<&CheckpointConfig::save_total_limit>(
        "save_total_limit", "keep the last so many checkpoints, and the best one beside them; 0: all")
        .within(0, 0x1p31)
        .from("save_total_limit"),
    applied<&CheckpointConfig::async_save>("async_save",
                                           "files are written while training goes on, from a copy in memory")
        .from("async_save"),
    applied<&CheckpointConfig::exclude_frozen_parameters>(
        "exclude_frozen_parameters",
        "parameters that are not trained, as those that LoRA adapts, are not saved: a run that is resumed "
        "must load them before, as it did at first"),
    applied<&CheckpointConfig::signals>(
        "signals",
        "SIGUSR1: save; SIGTERM, SIGINT (Ctrl-C): save and stop; one engine of a process may have them"),
    applied<&CheckpointConfig::stop_before_allocation_end>(
        "stop_before_allocation_end",
        "save and stop before the end of a Slurm allocation (SLURM_JOB_END_TIME), where there is one"),
    applied<&CheckpointConfig::allocation_margin>(
        "allocation_margin", "by so many seconds; they must suffice for an update and a save")
        .within(0, 0x1p31),
    applied<&Draft::resume>(
        "resume_from_checkpoint",
        "true: begin with the last checkpoint of output_dir, if it has one; or a folder that has one, a "
        "checkpoint in it, or its file best; a run that its launcher restarts begins with the last one that "
        "it has saved itself")
        .from("resume_from_checkpoint"),
    applied<&CheckpointConfig::eval_steps>(
        "eval_steps", "TrainingCheckpoints::should_evaluate() after every so many updates; 0: never")
        .within(0, 0x1p53)
        .from("eval_steps"),
    applied<&CheckpointConfig::metric_for_best_model>(
        "metric_for_best_model",
        "the metric that decides on the best checkpoint and on early stopping; eval_ may be left out")
        .from("metric_for_best_model"),
    applied<&Draft::greater_is_better>("greater_is_better",
                                       "null: unless the name of the metric ends in loss")
        .from("greater_is_better"),
    applied<&CheckpointConfig::load_best_model_at_end>("load_best_model_at_end",
                                                       "finish() loads the model of the best checkpoint")
        .from("load_best_model_at_end"),
    applied<&CheckpointConfig::early_stopping_patience>(
        "early_stopping_patience", "stop after so many evaluations in a row without improvement; null: never")
        .within(1, 0x1p30)
        .from("early_stopping_patience"),
    applied<&CheckpointConfig::early_stopping_threshold>("early_stopping_threshold",
                                                         "what an improvement must exceed")
        .from("early_stopping_threshold"),
};

constexpr ObjectSpec table[] = {
    {"ringzero", "", ringzero},
    {"ringzero.mesh", "", mesh},
    {"ringzero.comm_state_option", "", comm_state_option},
    {"ringzero.join", "", join},
    {"ringzero.lora", "", lora},
    {"ringzero.checkpoint", "", checkpoint},
    {"ringzero.trace", "", trace},
};

}  // namespace

std::span<const ObjectSpec> ringzero_objects() { return table; }

}  // namespace rz::ds
