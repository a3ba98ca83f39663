// Keys that DeepSpeed does not have.

#include "sharding/config/key_spec.h"

namespace rz::ds {
namespace {

using enum Kind;

constexpr KeySpec ringzero[] = {
    applied(
        "deterministic", choice, "\"rank_order\"",
        "rank_order: the same bits for every strategy at a number of ranks; world_size_invariant: also for "
        "1, 2, 4, 8, … ranks, at the same train_batch_size and train_micro_batch_size_per_gpu; "
        "docs/guide/determinism.md")
        .one_of("[\"rank_order\", \"world_size_invariant\"]"),
    applied("unused_parameters", choice, "\"pytorch\"",
            "a parameter that no loss reaches: pytorch skips its update, deepspeed updates it with a zero "
            "gradient")
        .one_of("[\"pytorch\", \"deepspeed\"]"),
    applied("find_unused_parameters", boolean, "null",
            "false: a parameter that no loss reaches on some rank is an error, with names and ranks; null: "
            "zero_optimization.ignore_unused_parameters decides")
        .from(Argument::find_unused_parameters),
    applied("static_graph", boolean, "false",
            "the gradients of every update, and their order, are those of the first, or it is an error")
        .from(Argument::static_graph),
    applied("broadcast_buffers", boolean, "true",
            "buffers are those of rank 0 in every forward pass that trains; false: each rank has its own")
        .from(Argument::broadcast_buffers),
    applied("comm_hook", choice, "\"no\"",
            "stage 0: what forms the means of gradients: no (all_reduce), fp16 or bf16 (rounded to 16 bits), "
            "power_sgd, batched_power_sgd")
        .one_of("[\"no\", \"fp16\", \"bf16\", \"power_sgd\", \"batched_power_sgd\"]")
        .from(Argument::comm_hook),
    applied(
        "max_skipped_updates", integer, "null",
        "so many updates in a row that are skipped, because gradients are not finite or no target counts, "
        "are an error (Errc::diverged); 0: any number; null: 50, but with a dynamic loss scale of fp16 any "
        "number, until min_loss_scale")
        .within(0, 0x1p53),
    section("comm_state_option", "null", "of power_sgd and batched_power_sgd"),
    refused("comm_wrapper", "\"no\"", "[\"no\"]",
            "hooks are not wrapped; comm_hook fp16 and bf16 send 16 bits"),
    section("join", "null", "of Engine::Join: ranks with different numbers of batches"),
    section("checkpoint", "{}", "checkpoints, evaluation, early stopping; docs/guide/checkpoints.md"),
    accepted("gradient_as_bucket_view", "false", "gradients always are parts of buckets"),
};

constexpr KeySpec comm_state_option[] = {
    applied("matrix_approximation_rank", integer, "1", "columns of the factors of a gradient")
        .within(1, 1 << 16),
    applied("start_powerSGD_iter", integer, "1000", "passes that are reduced whole before compression begins")
        .within(2, 0x1p62),
    applied("min_compression_rate", number, "2",
            "a gradient is compressed if it has more than this many times the elements of its factors")
        .within(1e-300, unbounded),
    applied("use_error_feedback", boolean, "true", "adds what compression has lost to the next gradients"),
    applied("warm_start", boolean, "true", "starts from the factor of the pass before"),
    applied("random_seed", integer, "0", "of the first factor").within(0, 0x1p53),
    refused("orthogonalization_epsilon", "0", "[0, 1e-8]", "columns are orthogonalised with 1e-8"),
    accepted("compression_stats_logging_frequency", "10000",
             "Engine::strategy().logging_data() has the traffic"),
    accepted("batch_tensors_with_same_shape", "false", "results do not depend on it"),
};

constexpr KeySpec join[] = {
    applied("enable", boolean, "true", "false: ranks must have equally many batches, and do not exchange it"),
    applied("divide_by_initial_world_size", boolean, "true",
            "losses without terms: means divide by the number of all ranks; false: of those that have data"),
    applied("throw_on_early_termination", boolean, "false",
            "an error on all ranks where one runs out of data, which is named"),
};

constexpr KeySpec checkpoint[] = {
    applied("output_dir", text, "\"\"",
            "folder of the checkpoints, shared by all ranks; empty: none are saved")
        .from(Argument::output_dir),
    applied("save_steps", integer, "0", "save every so many updates; 0: not by number")
        .within(0, 0x1p53)
        .from(Argument::save_steps),
    applied("save_minutes", integer, "0",
            "save when the last checkpoint is so many minutes old; 0: not by time")
        .within(0, 0x1p31)
        .from(Argument::save_minutes),
    applied("save_total_limit", integer, "0",
            "keep the last so many checkpoints, and the best one beside them; 0: all")
        .within(0, 0x1p31)
        .from(Argument::save_total_limit),
    applied("async_save", boolean, "false", "files are written while training goes on, from a copy in memory")
        .from(Argument::async_save),
    applied("signals", boolean, "true",
            "SIGUSR1: save; SIGTERM: save and stop; one engine of a process may have them"),
    applied("stop_before_allocation_end", boolean, "true",
            "save and stop before the end of a Slurm allocation (SLURM_JOB_END_TIME), where there is one"),
    applied("allocation_margin", integer, "120",
            "by so many seconds; they must suffice for an update and a save")
        .within(0, 0x1p31),
    applied(
        "resume_from_checkpoint", any, "false",
        "true: begin with the last checkpoint of output_dir, if it has one; or a folder that has one, a "
        "checkpoint in it, or its file best; a run that its launcher restarts begins with the last one that "
        "it has saved itself")
        .from(Argument::resume_from_checkpoint),
    applied("eval_steps", integer, "0",
            "TrainingCheckpoints::should_evaluate() after every so many updates; 0: never")
        .within(0, 0x1p53)
        .from(Argument::eval_steps),
    applied("metric_for_best_model", text, "\"eval_loss\"",
            "the metric that decides on the best checkpoint and on early stopping; eval_ may be left out")
        .from(Argument::metric_for_best_model),
    applied("greater_is_better", boolean, "null", "null: unless the name of the metric ends in loss")
        .from(Argument::greater_is_better),
    applied("load_best_model_at_end", boolean, "false", "finish() loads the model of the best checkpoint")
        .from(Argument::load_best_model_at_end),
    applied("early_stopping_patience", integer, "null",
            "stop after so many evaluations in a row without improvement; null: never")
        .within(1, 0x1p30)
        .from(Argument::early_stopping_patience),
    applied("early_stopping_threshold", number, "0", "what an improvement must exceed")
        .from(Argument::early_stopping_threshold),
};

constexpr ObjectSpec table[] = {
    {"ringzero", "", ringzero},
    {"ringzero.comm_state_option", "", comm_state_option},
    {"ringzero.join", "", join},
    {"ringzero.checkpoint", "", checkpoint},
};

}  // namespace

std::span<const ObjectSpec> ringzero_objects() { return table; }

}  // namespace rz::ds
