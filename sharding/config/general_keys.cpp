// Keys of the whole configuration, and the sections that no other file has.

#include "sharding/config/keys.h"

namespace rz::ds {
namespace {

using enum Kind;
constexpr double max_mesh_size = 1 << 20;
constexpr double max_batch = 1ull << 40, max_micro = 1 << 20;
constexpr const char* no_such_model = "needs parts of a model or a launcher that ringzero does not have";
constexpr const char* own_plan = "EngineOptions::parallelize divides a module of one's own; remove the key";
constexpr const char* later = "belongs to a later release";

constexpr KeySpec top[] = {
    applied<&BatchConfig::train>(
        "train_batch_size", "samples of an update over all ranks; two of the three sizes determine the third")
        .within(1, max_batch)
        .from("train_batch_size"),
    applied<&BatchConfig::micro>("train_micro_batch_size_per_gpu", "samples of a pass on a rank")
        .within(1, max_micro)
        .from("per_device_train_batch_size"),
    applied<&BatchConfig::accumulation>("gradient_accumulation_steps", "passes of an update")
        .within(1, max_micro)
        .from("gradient_accumulation_steps"),
    applied<&DsConfig::gradient_clipping>("gradient_clipping", "limit of the global norm; 0: no clipping")
        .from("max_grad_norm"),
    section("optimizer", "null", "without it there is no optimizer"),
    section("scheduler", "null", "without it the rate is constant"),
    section("fp16", "{}", ""),
    section("bf16", "{}", ""),
    section("data_types", "{}", ""),
    section("amp", "null", ""),
    section("torch_autocast", "{}", ""),
    section("zero_optimization", "{}", "also true (stage 1) or false"),
    section("activation_checkpointing", "{}", ""),
    applied<&WireFormat::communication_data_type>(
        "communication_data_type",
        "gradients are reduced in this dtype; null: that of data_types.grad_accum_dtype"),
    applied<&WireFormat::prescale_gradients>(
        "prescale_gradients", "gradients are divided by the number of ranks before the sum, not after it"),
    applied<&WireFormat::gradient_predivide_factor>(
        "gradient_predivide_factor",
        "gradients are divided by it before the sum, and by ranks / factor after it")
        .within(1e-300, unbounded),
    refused("gradient_allreduce_op", "\"mean\"", "[\"mean\"]", "gradients are means over the ranks"),
    refused("managed_gradient_accumulation", "true", "[true]",
            "the engine decides which pass ends an update"),
    refused("sparse_gradients", "false", "[false]", "gradients of embeddings are dense"),
    applied<&DsConfig::drop_last>("dataloader_drop_last", "drop the samples of an epoch that fill no batch")
        .from("dataloader_drop_last"),
    applied<&MonitorConfig::steps_per_print>("steps_per_print", "updates between lines of progress")
        .within(1, 0x1p62)  // "never" is written as a large number
        .or_infinity()
        .from("logging_steps"),
    applied<&MonitorConfig::wall_clock_breakdown>(
        "wall_clock_breakdown", "time of forward, backward and step, every steps_per_print (10)"),
    applied<&MonitorConfig::memory_breakdown>("memory_breakdown", "bytes held, every steps_per_print (10)"),
    accepted("dump_state", boolean, "false", "the resolved configuration is always printed"),
    accepted("seq_parallel_communication_data_type", "\"fp32\"", "of Ulysses, which there is not"),
    refused("sequence_parallel_size", "1", "[1]",
            "there is no Ulysses; ringzero.sequence_parallel divides tokens between the ranks of "
            "ringzero.mesh.tp"),
    applied<&Draft::data_parallel_size>(
        "data_parallel_size",
        "ranks with data of their own, replicate times shard of ringzero.mesh, which must have so many")
        .within(1, max_mesh_size),
    accepted("zero_allow_untested_optimizer", "false", "every optimizer is tested with every stage"),
    accepted("zero_force_ds_cpu_optimizer", "true", "each device has its own kernels"),
    accepted("disable_allgather", "false", "DeepSpeed reads it and does nothing"),
    accepted("graph_harvesting", "false", "updates are captured in CUDA graphs wherever possible"),
    accepted("log_level", "null"),
    accepted("disable_python_gc", "false", "Python only"),
    accepted("vocabulary_size", "null", "known from the model"),
    accepted("use_data_before_expert_parallelism", "false", "there are no experts"),
    refused("expert_parallel", "null", "[null, {}]", no_such_model),
    refused("pipeline", "null", "[null, {}]", no_such_model),
    refused("sparse_attention", "null", "[null]", no_such_model),
    refused("progressive_layer_drop", "null", "[null, {}]", no_such_model),
    refused("weight_quantization", "null", "[null, {}]", later),
    refused("quantize_training", "null", "[null, {}]", later),
    refused("compression_training", "null", "[null, {}]", later),
    refused("inference", "null", "[null, {}]", "an engine without an optimizer runs inference"),
    refused("datastates_ckpt", "false", "[false, null]", later),
    section("tensor_parallel", "null", ""),
    section("hybrid_engine", "null", ""),
    section("curriculum_learning", "null", ""),
    section("data_efficiency", "null", ""),
    section("elasticity", "null", ""),
    section("autotuning", "null", ""),
    section("eigenvalue", "null", ""),
    section("compile", "null", ""),
    section("nebula", "null", ""),
    section("checkpoint", "{}", ""),
    section("aio", "null", ""),
    section("comms_logger", "{}", ""),
    section("flops_profiler", "{}", ""),
    section("timers", "null", ""),
    section("csv_monitor", "{}", ""),
    section("tensorboard", "{}", ""),
    section("wandb", "null", ""),
    section("comet", "null", ""),
    section("ringzero", "{}", "keys that DeepSpeed does not have"),
};

constexpr KeySpec activation_checkpointing[] = {
    applied<&Draft::partition_activations>(
        "partition_activations",
        "true: blocks keep no activations and compute them again in backward; there is no model "
        "parallelism to partition over")
        .from("gradient_checkpointing"),
    applied<&Draft::number_checkpoints>("number_checkpoints",
                                        "not null: as partition_activations, for every block")
        .within(0, max_micro),
    applied<&Draft::cpu_checkpointing>("cpu_checkpointing",
                                       "true: as partition_activations; what is kept stays on the device"),
    accepted("contiguous_memory_optimization", "false", "activations come from a pool"),
    accepted("synchronize_checkpoint_boundary", "false"),
    accepted("profile", "false"),
};

constexpr KeySpec tensor_parallel[] = {
    applied<&Draft::autotp_size>("autotp_size", "ringzero.mesh.tp; 0: the mesh decides")
        .within(0, max_mesh_size),
    applied<&Draft::tp_size>("tp_size", "the same; 0 or 1: the mesh decides").within(0, max_mesh_size),
    section("tp", "null", ""),
    section("tensor_parallel", "null", "another spelling of tp"),
    accepted("dtype", "\"fp16\"", "that of the model"),
    accepted("tp_overlap_comm", "false", "results do not depend on it"),
    refused("tp_grain_size", "1", "[1]", "a layer is divided by its heads, features or tokens"),
    refused("injection_policy_tuple", "null", "[null]", own_plan),
    refused("partition_config", "null", "[null, {}]", own_plan),
    refused("preset_model", "null", "[null, \"\"]",
            "a language model has the plan of its family, which its config.json names; remove the key"),
    always("vocab_parallel_lm_head", "true", "embeddings and heads are divided by tokens"),
    accepted("vocab_parallel_ce_backend", "\"torch\""),
    accepted("keep_module_on_host", "false"),
    accepted("replace_with_kernel_inject", "false"),
};

// Of inference in DeepSpeed; its training has autotp_size.
constexpr KeySpec tp[] = {
    applied<&Draft::tp_size>("tp_size", "ringzero.mesh.tp; 0 or 1: the mesh decides")
        .within(0, max_mesh_size),
    accepted("tp_grain_size", "1", "of inference"),
    refused("mpu", "null", "[null]", "ringzero.mesh has the ranks"),
    refused("tp_group", "null", "[null]", "ringzero.mesh has the ranks"),
};

constexpr KeySpec hybrid_engine[] = {
    refused("enabled", "false", "[false]", "generation and training share one engine"),
    accepted("max_out_tokens", "512"),
    accepted("inference_tp_size", "1"),
    accepted("release_inference_cache", "false"),
    accepted("pin_parameters", "true"),
    accepted("tp_gather_partition_size", "8"),
    accepted("enable_cuda_graph", "false"),
};

constexpr KeySpec curriculum[] = {
    refused("enabled", "false", "[false]", "the order of samples is fixed or shuffled"),
    accepted("curriculum_type", "null"),
    accepted("min_difficulty", "null"),
    accepted("max_difficulty", "null"),
    accepted("schedule_type", "null"),
    accepted("schedule_config", "null"),
    accepted("params", "null"),
    accepted("data_cluster_path", "null"),
    accepted("curriculum_metrics", "null"),
};

constexpr KeySpec data_efficiency[] = {
    refused("enabled", "false", "[false]", "the order of samples is fixed or shuffled"),
    accepted("seed", "1234"),
    refused("data_sampling", "null", "[null, {}]", "the order of samples is fixed or shuffled"),
    refused("data_routing", "null", "[null, {}]", no_such_model),
};

constexpr KeySpec elasticity[] = {
    refused("enabled", "false", "[false]", "batch sizes are given, not searched for"),
    accepted("max_train_batch_size", "2000"),
    accepted("micro_batch_sizes", "[2, 4, 6]"),
    accepted("min_gpus", "1"),
    accepted("max_gpus", "10000"),
    accepted("num_gpus_per_node", "1"),
    accepted("model_parallel_size", "1"),
    accepted("min_time", "0"),
    accepted("prefer_larger_batch", "true"),
    accepted("ignore_non_elastic_batch_info", "false"),
    accepted("version", "0.2"),
};

constexpr KeySpec autotuning[] = {
    refused("enabled", "false", "[false]", "no configuration is searched for"),
    accepted("fast", "true"),
    accepted("results_dir", "\"autotuning_results\""),
    accepted("exps_dir", "\"autotuning_exps\""),
    accepted("overwrite", "true"),
    accepted("start_profile_step", "3"),
    accepted("end_profile_step", "5"),
    accepted("metric_path", "null"),
    accepted("tuner_type", "\"gridsearch\""),
    accepted("tuner_early_stopping", "5"),
    accepted("tuner_num_trials", "50"),
    accepted("arg_mappings", "null"),
    accepted("max_train_batch_size", "null"),
    accepted("min_train_batch_size", "1"),
    accepted("max_train_micro_batch_size_per_gpu", "1024"),
    accepted("min_train_micro_batch_size_per_gpu", "1"),
    accepted("num_tuning_micro_batch_sizes", "3"),
    accepted("mp_size", "1"),
    accepted("metric", "\"throughput\""),
    accepted("model_info_path", "null"),
    accepted("model_info", "null"),
    accepted("zero_optimization", "null"),
};

constexpr KeySpec eigenvalue[] = {
    refused("enabled", "false", "[false]", later),
    accepted("verbose", "false"),
    accepted("max_iter", "100"),
    accepted("tol", "0.01"),
    accepted("stability", "1e-06"),
    accepted("gas_boundary_resolution", "1"),
    accepted("layer_name", "\"bert.encoder.layer\""),
    accepted("layer_num", "0"),
};

constexpr KeySpec compile[] = {
    refused("deepcompile", "false", "[false]", "programs are compiled ahead of time"),
    refused("offload_activation", "false", "[false]", "activations stay on the device"),
    refused("offload_opt_states", "false", "[false]", "use zero_optimization.offload_optimizer"),
    refused("offload_parameters", "false", "[false]", "use zero_optimization.offload_param"),
    accepted("enabled", "false"),
    accepted("disable", "false"),
    accepted("backend", "\"inductor\""),
    accepted("kwargs", "{}"),
    accepted("free_activation", "false"),
    accepted("free_activation_threshold", "10485760"),
    accepted("offload_activation_pin_memory", "true"),
    accepted("double_buffer", "true"),
    accepted("symmetric_memory", "false"),
    accepted("debug_log", "false"),
    accepted("sync_before_reduce", "false"),
    accepted("sync_after_reduce", "false"),
    accepted("sync_before_allgather", "false"),
    accepted("sync_after_allgather", "false"),
    accepted("keep_int_input_tensors", "true"),
    accepted("keep_all_input_tensors", "false"),
    accepted("passes", "null"),
    accepted("autoep_non_moe", "false"),
};

constexpr ObjectSpec table[] = {
    {"", "", top},
    {"activation_checkpointing", "", activation_checkpointing},
    {"tensor_parallel", "", tensor_parallel, true},
    {"tensor_parallel.tp", "", tp, true},
    {"tensor_parallel.tensor_parallel", "", tp, true},
    {"hybrid_engine", "", hybrid_engine, true},
    {"curriculum_learning", "", curriculum},
    {"data_efficiency", "", data_efficiency},
    {"elasticity", "", elasticity},
    {"autotuning", "", autotuning},
    {"eigenvalue", "", eigenvalue},
    {"compile", "", compile, true},
};

}  // namespace

std::span<const ObjectSpec> general_objects() { return table; }

}  // namespace rz::ds
