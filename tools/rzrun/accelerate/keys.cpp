#include "tools/rzrun/accelerate/keys.h"

#include <algorithm>
#include <vector>

#include "comm/core/lazy.h"
#include "comm/core/text.h"

namespace rz::accelerate {
namespace {

constexpr auto applied = Treatment::applied, no_effect = Treatment::accepted, refused = Treatment::refused;
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

/// Keys of a block that are treated alike.
struct Row {
  std::string_view block;
  FlagKind flag;
  Treatment treatment;
  std::string_view names, note{}, help{};
};
constexpr Row table[] = {
    {"", none, applied, "compute_environment distributed_type fp16 use_cpu rdzv_backend"},
    {"", value, applied, "num_processes", "", "Ranks of all hosts"},
    {"", value, applied, "num_machines", "", "Hosts"},
    {"", value, applied, "machine_rank", "", "Number of this host"},
    {"", value, applied, "main_process_ip", "", "Host 0"},
    {"", value, applied, "main_process_port", "", "Its port"},
    {"", value, applied, "gpu_ids", "", "all, or those of this host: 0,1"},
    {"", value, applied, "mixed_precision", "", "no, bf16 or fp16"},
    {"", toggle, no_effect, "same_network", "hosts connect to main_process_ip in either case"},
    {"", toggle, no_effect, "debug", "ranks always compare their collectives"},
    {"", toggle, no_effect, "enable_cpu_affinity", of_bind},
    {"", value, no_effect, "main_training_function", "ranks run a program, not a function"},
    {"", toggle, refused, "downcast_bf16 tpu_use_sudo", of_tpu},
    {"", value, no_effect, "dynamo_backend", of_compiler},
    {"", none, refused, "tpu_name tpu_zone tpu_use_cluster tpu_vm tpu_env command_file commands", of_tpu},
    {"", none, refused,
     "ec2_instance_type iam_role_name image_uri profile region base_job_name pytorch_version "
     "transformers_version py_version sagemaker_inputs_file sagemaker_metrics_file additional_args",
     of_sagemaker},

    {flag, toggle, applied, "cpu", "", "No device is visible to the ranks"},
    {flag, toggle, applied, "multi_gpu", "", "distributed_type: MULTI_GPU"},
    {flag, toggle, applied, "use_deepspeed", "", "distributed_type: DEEPSPEED"},
    {flag, toggle, applied, "use_fsdp", "", "distributed_type: FSDP"},
    {flag, toggle, no_effect, "use_parallelism_config", "its keys are read where they are given"},
    {flag, value, applied, "num_cpu_threads_per_process", "", "OMP_NUM_THREADS"},
    {flag, toggle, no_effect, "quiet", "there is no stack trace of a launcher"},
    {flag, toggle, refused, "tpu tpu_cluster", of_tpu},
    {flag, toggle, no_effect, "no_tpu_cluster", "the default"},
    {flag, value, refused, "vm", of_tpu},
    {flag, value, refused, "env", "variables of TPUs; use -x NAME=VALUE"},
    {flag, toggle, refused, "use_megatron_lm", of_megatron},
    {flag, toggle, refused, "use_xpu", "devices are CUDA's; remove it"},
    {flag, value, refused, "aws_access_key_id aws_secret_access_key", of_sagemaker},

    {ds, value, applied, "zero_stage", "", "0 to 3"},
    {ds, value, applied, "gradient_accumulation_steps", "", "Passes of an update"},
    {ds, value, applied, "gradient_clipping", "", "Limit of the norm of gradients"},
    {ds, value, applied,
     "offload_optimizer_device offload_param_device zero3_save_16bit_model deepspeed_hostfile "
     "deepspeed_multinode_launcher deepspeed_inclusion_filter deepspeed_exclusion_filter"},
    {ds, value, refused, "offload_optimizer_nvme_path offload_param_nvme_path",
     "offload is to host memory; use the device cpu"},
    {ds, value, no_effect, "zero3_init_flag", "no rank ever has a whole model of stage 3"},
    {ds, value, applied, "deepspeed_config_file", "", "A DeepSpeed configuration, handed on in RZ_CONFIG"},
    {ds, value, refused, "deepspeed_moe_layer_cls_names", "there are no mixtures of experts; remove it"},

    {fsdp, value, applied,
     "fsdp_sharding_strategy fsdp_version fsdp_reshard_after_forward fsdp_offload_params "
     "fsdp_activation_checkpointing"},
    {fsdp, value, no_effect, "fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap fsdp_min_num_params",
     of_modules},
    {fsdp, value, no_effect, "fsdp_backward_prefetch fsdp_backward_prefetch_policy fsdp_forward_prefetch",
     of_prefetch},
    {fsdp, value, no_effect, "fsdp_state_dict_type",
     "any checkpoint loads into any number of ranks and stage"},
    {fsdp, value, no_effect, "fsdp_use_orig_params", "parameters are never flattened for the program"},
    {fsdp, value, no_effect, "fsdp_sync_module_states", "all ranks have the initial values of one model"},
    {fsdp, value, no_effect, "fsdp_cpu_ram_efficient_loading", "each rank reads its part of a file"},
    {fsdp, none, refused, "fsdp_ignored_modules", "all modules are divided; remove it"},

    {mesh, value, applied,
     "parallelism_config_dp_replicate_size parallelism_config_dp_shard_size "
     "parallelism_config_tp_size parallelism_config_cp_size parallelism_config_sp_size"},
    {mesh, value, no_effect, "parallelism_config_cp_backend parallelism_config_cp_comm_strategy",
     "cp_size above 1 is refused"},
    {mesh, value, no_effect,
     "parallelism_config_sp_backend parallelism_config_sp_seq_length "
     "parallelism_config_sp_seq_length_is_variable parallelism_config_sp_attn_implementation",
     "sp_size above 1 is refused"},

    {tp, none, applied, "tp_size"},

    {fp8, value, no_effect,
     "fp8_backend fp8_margin fp8_interval fp8_format fp8_amax_history_len fp8_amax_compute_algo "
     "fp8_override_linear_precision fp8_opt_level fp8_enable_fsdp_float8_all_gather "
     "fp8_pad_inner_dim",
     of_fp8},
    {fp8, toggle, no_effect, "fp8_use_autocast_during_eval", of_fp8},
    {fp8, none, no_effect, "fp8_amax_history_length fp8_amax_compute_algorithm fp8_optimization_level",
     of_fp8},

    {dynamo, value, no_effect, "dynamo_mode", of_compiler},
    {dynamo, toggle, no_effect, "dynamo_use_fullgraph dynamo_use_dynamic dynamo_use_regional_compilation",
     of_compiler},

    {ipex, toggle, no_effect, "ipex", of_intel},

    {mpirun, value, refused, "mpirun_hostfile",
     "ranks are started by rzrun; use --hostfile FILE, or mpirun PROGRAM"},
    {mpirun, value, no_effect, "mpirun_ccl", "oneCCL is not used"},

    {megatron, value, refused,
     "megatron_lm_tp_degree megatron_lm_pp_degree megatron_lm_num_micro_batches "
     "megatron_lm_sequence_parallelism megatron_lm_recompute_activations "
     "megatron_lm_use_distributed_optimizer megatron_lm_gradient_clipping",
     of_megatron},
};

std::vector<Key> all_keys() {
  std::vector<Key> all;
  for (const Row& row : table)
    for (const std::string_view name : words_of(row.names))
      all.push_back({row.block, name, row.treatment, row.flag, row.note, row.help});
  return all;
}

}  // namespace

std::span<const Key> keys() {
  static constinit Lazy<std::vector<Key>> all;
  return all.get(all_keys);
}

const Key* find_key(std::string_view name) {
  const auto found = std::ranges::find(keys(), name, &Key::name);
  return found == keys().end() ? nullptr : &*found;
}

std::span<const std::string_view> blocks() { return all_blocks; }

std::string_view prefix_of(std::string_view block) {
  return block == fsdp ? "fsdp_" : block == fp8 ? "fp8_" : block == dynamo ? "dynamo_" : "";
}

}  // namespace rz::accelerate
