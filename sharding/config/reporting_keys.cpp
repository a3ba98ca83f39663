// Keys of the sections about logs, profiles and files.

#include "sharding/config/keys.h"

namespace rz::ds {
namespace {

using enum Kind;
constexpr const char* metrics =
    "train_lm --track sends each update to a program of the user's; tensorboard and csv_monitor write files";
constexpr KeySpec enabled = unused("enabled", boolean, "false", metrics);

constexpr KeySpec csv_monitor[] = {
    applied<&MonitorConfig::csv_enabled>(
        "enabled", "rank 0 writes loss, rate, norm, times and evaluations of each update"),
    applied<&MonitorConfig::csv_output_path>("output_path", "folder of the files"),
    applied<&MonitorConfig::csv_job_name>("job_name", "folder below it")};
constexpr KeySpec tensorboard[] = {
    applied<&MonitorConfig::tensorboard_enabled>(
        "enabled", "rank 0 writes event files: loss, rate, norm, times and evaluations of each update"),
    applied<&MonitorConfig::tensorboard_output_path>("output_path", "folder of the files"),
    applied<&MonitorConfig::tensorboard_job_name>("job_name", "folder below it")};
constexpr KeySpec wandb[] = {enabled, accepted("group", "null"), accepted("team", "null"),
                             accepted("project", "\"deepspeed\"")};
constexpr KeySpec comet[] = {
    enabled,
    accepted("samples_log_interval", "100"),
    accepted("project", "null"),
    accepted("workspace", "null"),
    accepted("api_key", "null"),
    accepted("experiment_name", "null"),
    accepted("experiment_key", "null"),
    accepted("online", "null"),
    accepted("mode", "null"),
};
constexpr KeySpec comms_logger[] = {
    applied<&MonitorConfig::comms_enabled>(
        "enabled",
        "measures collectives of updates, each of which is then awaited at once: they do not overlap with "
        "computation; a table at the end, and Engine::log_summary()"),
    applied<&MonitorConfig::comms_verbose>("verbose", "rank 0 prints a line for each collective"),
    applied<&MonitorConfig::comms_prof_all>("prof_all", "false: those of prof_ops only"),
    applied<&Draft::prof_ops>("prof_ops",
                              "operations that are measured without prof_all, [\"all_reduce\", "
                              "\"all_gather_into_tensor\"]"),
    accepted("debug", "false", "callers are not named"),
};
constexpr KeySpec flops_profiler[] = {
    applied<&FlopsProfilerConfig::enabled>(
        "enabled",
        "measures one update on rank 0, which then runs in no CUDA graph: multiply-accumulates (MACs) of "
        "products, convolutions and attention, two operations (FLOPs) each, and times, by module"),
    accepted("recompute_fwd_factor", "0.0", "what backward computes again is counted there"),
    applied<&FlopsProfilerConfig::profile_step>("profile_step",
                                                "the number of the update, from 0, in this run and the one "
                                                "that it resumes"),
    applied<&FlopsProfilerConfig::module_depth>("module_depth", "depth of the report; -1: all modules")
        .within(-1, 1e6),
    applied<&FlopsProfilerConfig::top_modules>(
        "top_modules", "the largest modules of each depth, by MACs, parameters and time"),
    applied<&FlopsProfilerConfig::detailed>("detailed", "a table of all modules"),
    applied<&FlopsProfilerConfig::output_file>("output_file", "file of the report, in place of the log"),
};
constexpr KeySpec timers[] = {accepted("throughput", "null", "tokens per second are always measured")};
constexpr KeySpec checkpoint[] = {
    accepted("tag_validation", choice, "\"WARN\"",
             "FAIL in every case: ranks that save under different tags are an error, and nothing is written")
        .one_of("[\"WARN\", \"IGNORE\", \"FAIL\"]"),
    accepted("load_universal", "false", "every checkpoint is read by any number of ranks in any stage"),
    refused("use_node_local_storage", "false", "[false]",
            "a checkpoint is a folder that all ranks share; without one it could not be read by another "
            "number of ranks"),
    accepted("parallel_write", "null", "every rank writes its own part"),
    accepted("checkpoint_serialization", "true", "files are safetensors"),
    accepted("writer", "null", "ringzero.checkpoint.async_save writes while training goes on"),
};
constexpr KeySpec aio[] = {
    accepted("block_size", "1048576", "of nvme"),
    accepted("queue_depth", "8", "of nvme"),
    accepted("intra_op_parallelism", "1", "of nvme"),
    accepted("single_submit", "false", "of nvme"),
    accepted("overlap_events", "true", "of nvme"),
    accepted("use_gds", "false", "of nvme"),
    accepted("thread_count", "1", "older name of intra_op_parallelism"),
};
constexpr KeySpec nebula[] = {
    refused("enabled", "false", "[false]", "checkpoints are files"),
    accepted("enable_nebula_load", "true"),
    accepted("nebula_load_path", "null"),
    accepted("load_path", "null"),
    accepted("persistent_storage_path", "null"),
    accepted("persistent_time_interval", "100"),
    accepted("num_of_version_in_retention", "2"),
};

constexpr ObjectSpec table[] = {
    {"checkpoint", "", checkpoint},
    {"csv_monitor", "", csv_monitor, true},
    {"tensorboard", "", tensorboard, true},
    {"wandb", "", wandb, true},
    {"comet", "", comet, true},
    {"comms_logger", "", comms_logger, true},
    {"flops_profiler", "", flops_profiler, true},
    {"timers", "", timers},
    {"aio", "", aio},
    {"nebula", "", nebula},
};

}  // namespace

std::span<const ObjectSpec> reporting_objects() { return table; }

}  // namespace rz::ds
