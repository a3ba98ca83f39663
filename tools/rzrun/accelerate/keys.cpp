#include "tools/rzrun/accelerate/keys.h"

#include <algorithm>

namespace rz::accelerate {
namespace {

constexpr auto done = Treatment::done, no_effect = Treatment::no_effect, refused = Treatment::refused;
constexpr auto none = FlagKind::none, value = FlagKind::value, toggle = FlagKind::toggle;

constexpr std::string_view ds = "deepspeed_config", fsdp = "fsdp_config", mesh = "parallelism_config",
                           fp8 = "fp8_config", dynamo = "dynamo_config", megatron = "megatron_lm_config",
                           ipex = "ipex_config", mpirun = "mpirun_config", tp = "tp_config", flag = "flag";

constexpr std::string_view all_blocks[] = {ds, fsdp, mesh, fp8, dynamo, megatron, ipex, mpirun, tp};

constexpr std::string_view
    of_tpu = "TPUs are not supported; remove it",
    of_sagemaker = "jobs on SageMaker are not started; use LOCAL_MACHINE",
    of_compiler = "there is no compiler of Python here",
    of_fp8 = "mixed_precision: fp8 decides, and is refused",
    of_megatron =
        "Megatron-LM is not started; divide layers with parallelism_config_tp_size, or "
        "ringzero.mesh.tp of a DeepSpeed configuration",
    of_intel = "kernels choose their vector instructions themselves",
    of_modules = "values are gathered layer by layer, without wrappers",
    of_prefetch = "values are gathered ahead by zero_optimization.stage3_prefetch_bucket_size",
    of_context = "sequences are not divided between ranks; remove it",
    of_bind = "rzrun binds ranks to cores, unless --bind none";

constexpr Key table[] = {
    {"", "compute_environment"},
    {"", "distributed_type"},
    {"", "num_processes", done, value, "", "Ranks of all hosts"},
    {"", "num_machines", done, value, "", "Hosts"},
    {"", "machine_rank", done, value, "", "Number of this host"},
    {"", "main_process_ip", done, value, "", "Host 0"},
    {"", "main_process_port", done, value, "", "Its port"},
    {"", "gpu_ids", done, value, "", "all, or those of this host: 0,1"},
    {"", "mixed_precision", done, value, "", "no, bf16 or fp16"},
    {"", "fp16"},
    {"", "use_cpu"},
    {"", "rdzv_backend"},
    {"", "same_network", no_effect, toggle, "hosts connect to main_process_ip in either case"},
    {"", "debug", no_effect, toggle, "ranks always compare their collectives"},
    {"", "enable_cpu_affinity", no_effect, toggle, of_bind},
    {"", "main_training_function", no_effect, value, "ranks run a program, not a function"},
    {"", "downcast_bf16", refused, toggle, of_tpu},
    {"", "dynamo_backend", no_effect, value, of_compiler},
    {"", "tpu_name", refused, none, of_tpu},
    {"", "tpu_zone", refused, none, of_tpu},
    {"", "tpu_use_cluster", refused, none, of_tpu},
    {"", "tpu_use_sudo", refused, toggle, of_tpu},
    {"", "tpu_vm", refused, none, of_tpu},
    {"", "tpu_env", refused, none, of_tpu},
    {"", "command_file", refused, none, of_tpu},
    {"", "commands", refused, none, of_tpu},
    {"", "ec2_instance_type", refused, none, of_sagemaker},
    {"", "iam_role_name", refused, none, of_sagemaker},
    {"", "image_uri", refused, none, of_sagemaker},
    {"", "profile", refused, none, of_sagemaker},
    {"", "region", refused, none, of_sagemaker},
    {"", "base_job_name", refused, none, of_sagemaker},
    {"", "pytorch_version", refused, none, of_sagemaker},
    {"", "transformers_version", refused, none, of_sagemaker},
    {"", "py_version", refused, none, of_sagemaker},
    {"", "sagemaker_inputs_file", refused, none, of_sagemaker},
    {"", "sagemaker_metrics_file", refused, none, of_sagemaker},
    {"", "additional_args", refused, none, of_sagemaker},

    {flag, "cpu", done, toggle, "", "No device is visible to the ranks"},
    {flag, "multi_gpu", done, toggle, "", "distributed_type: MULTI_GPU"},
    {flag, "use_deepspeed", done, toggle, "", "distributed_type: DEEPSPEED"},
    {flag, "use_fsdp", done, toggle, "", "distributed_type: FSDP"},
    {flag, "use_parallelism_config", no_effect, toggle, "its keys are read where they are given"},
    {flag, "num_cpu_threads_per_process", done, value, "", "OMP_NUM_THREADS"},
    {flag, "quiet", no_effect, toggle, "there is no stack trace of a launcher"},
    {flag, "tpu", refused, toggle, of_tpu},
    {flag, "tpu_cluster", refused, toggle, of_tpu},
    {flag, "no_tpu_cluster", no_effect, toggle, "the default"},
    {flag, "vm", refused, value, of_tpu},
    {flag, "env", refused, value, "variables of TPUs; use -x NAME=VALUE"},
    {flag, "use_megatron_lm", refused, toggle, of_megatron},
    {flag, "use_xpu", refused, toggle, "devices are CUDA's; remove it"},
    {flag, "aws_access_key_id", refused, value, of_sagemaker},
    {flag, "aws_secret_access_key", refused, value, of_sagemaker},

    {ds, "zero_stage", done, value, "", "0 to 3"},
    {ds, "gradient_accumulation_steps", done, value, "", "Passes of an update"},
    {ds, "gradient_clipping", done, value, "", "Limit of the norm of gradients"},
    {ds, "offload_optimizer_device", done, value},
    {ds, "offload_param_device", done, value},
    {ds, "offload_optimizer_nvme_path", refused, value, "offload is to host memory; use the device cpu"},
    {ds, "offload_param_nvme_path", refused, value, "offload is to host memory; use the device cpu"},
    {ds, "zero3_init_flag", no_effect, value, "no rank ever has a whole model of stage 3"},
    {ds, "zero3_save_16bit_model", done, value},
    {ds, "deepspeed_config_file", done, value, "", "A DeepSpeed configuration, handed on in RZ_CONFIG"},
    {ds, "deepspeed_hostfile", done, value},
    {ds, "deepspeed_multinode_launcher", done, value},
    {ds, "deepspeed_inclusion_filter", done, value},
    {ds, "deepspeed_exclusion_filter", done, value},
    {ds, "deepspeed_moe_layer_cls_names", refused, value, "there are no mixtures of experts; remove it"},

    {fsdp, "fsdp_sharding_strategy", done, value},
    {fsdp, "fsdp_version", done, value},
    {fsdp, "fsdp_reshard_after_forward", done, value},
    {fsdp, "fsdp_offload_params", done, value},
    {fsdp, "fsdp_activation_checkpointing", done, value},
    {fsdp, "fsdp_auto_wrap_policy", no_effect, value, of_modules},
    {fsdp, "fsdp_transformer_layer_cls_to_wrap", no_effect, value, of_modules},
    {fsdp, "fsdp_min_num_params", no_effect, value, of_modules},
    {fsdp, "fsdp_backward_prefetch", no_effect, value, of_prefetch},
    {fsdp, "fsdp_backward_prefetch_policy", no_effect, value, of_prefetch},
    {fsdp, "fsdp_forward_prefetch", no_effect, value, of_prefetch},
    {fsdp, "fsdp_state_dict_type", no_effect, value,
     "any checkpoint loads into any number of ranks and stage"},
    {fsdp, "fsdp_use_orig_params", no_effect, value, "parameters are never flattened for the program"},
    {fsdp, "fsdp_sync_module_states", no_effect, value, "all ranks have the initial values of one model"},
    {fsdp, "fsdp_cpu_ram_efficient_loading", no_effect, value, "each rank reads its part of a file"},
    {fsdp, "fsdp_ignored_modules", refused, none, "all modules are divided; remove it"},

    {mesh, "parallelism_config_dp_replicate_size", done, value},
    {mesh, "parallelism_config_dp_shard_size", done, value},
    {mesh, "parallelism_config_tp_size", done, value},
    {mesh, "parallelism_config_cp_size", done, value},
    {mesh, "parallelism_config_sp_size", done, value},
    {mesh, "parallelism_config_cp_backend", no_effect, value, "cp_size above 1 is refused"},
    {mesh, "parallelism_config_cp_comm_strategy", no_effect, value, "cp_size above 1 is refused"},
    {mesh, "parallelism_config_sp_backend", no_effect, value, "sp_size above 1 is refused"},
    {mesh, "parallelism_config_sp_seq_length", no_effect, value, "sp_size above 1 is refused"},
    {mesh, "parallelism_config_sp_seq_length_is_variable", no_effect, value, "sp_size above 1 is refused"},
    {mesh, "parallelism_config_sp_attn_implementation", no_effect, value, "sp_size above 1 is refused"},
    {tp, "tp_size"},

    {fp8, "fp8_backend", no_effect, value, of_fp8},
    {fp8, "fp8_use_autocast_during_eval", no_effect, toggle, of_fp8},
    {fp8, "fp8_margin", no_effect, value, of_fp8},
    {fp8, "fp8_interval", no_effect, value, of_fp8},
    {fp8, "fp8_format", no_effect, value, of_fp8},
    {fp8, "fp8_amax_history_len", no_effect, value, of_fp8},
    {fp8, "fp8_amax_history_length", no_effect, none, of_fp8},
    {fp8, "fp8_amax_compute_algo", no_effect, value, of_fp8},
    {fp8, "fp8_amax_compute_algorithm", no_effect, none, of_fp8},
    {fp8, "fp8_override_linear_precision", no_effect, value, of_fp8},
    {fp8, "fp8_opt_level", no_effect, value, of_fp8},
    {fp8, "fp8_optimization_level", no_effect, none, of_fp8},
    {fp8, "fp8_enable_fsdp_float8_all_gather", no_effect, value, of_fp8},
    {fp8, "fp8_pad_inner_dim", no_effect, value, of_fp8},

    {dynamo, "dynamo_mode", no_effect, value, of_compiler},
    {dynamo, "dynamo_use_fullgraph", no_effect, toggle, of_compiler},
    {dynamo, "dynamo_use_dynamic", no_effect, toggle, of_compiler},
    {dynamo, "dynamo_use_regional_compilation", no_effect, toggle, of_compiler},

    {ipex, "ipex", no_effect, toggle, of_intel},
    {mpirun, "mpirun_hostfile", refused, value,
     "ranks are started by rzrun; use --hostfile FILE, or mpirun PROGRAM"},
    {mpirun, "mpirun_ccl", no_effect, value, "oneCCL is not used"},

    {megatron, "megatron_lm_tp_degree", refused, value, of_megatron},
    {megatron, "megatron_lm_pp_degree", refused, value, of_megatron},
    {megatron, "megatron_lm_num_micro_batches", refused, value, of_megatron},
    {megatron, "megatron_lm_sequence_parallelism", refused, value, of_megatron},
    {megatron, "megatron_lm_recompute_activations", refused, value, of_megatron},
    {megatron, "megatron_lm_use_distributed_optimizer", refused, value, of_megatron},
    {megatron, "megatron_lm_gradient_clipping", refused, value, of_megatron},
};

}  // namespace

std::span<const Key> keys() { return table; }

const Key* find_key(std::string_view name) {
  const Key* const found = std::ranges::find(table, name, &Key::name);
  return found == std::end(table) ? nullptr : found;
}

std::span<const std::string_view> blocks() { return all_blocks; }

std::string_view prefix_of(std::string_view block) {
  return block == fsdp ? "fsdp_" : block == fp8 ? "fp8_" : block == dynamo ? "dynamo_" : "";
}

}  // namespace rz::accelerate
