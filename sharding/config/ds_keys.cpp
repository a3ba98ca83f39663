#include "sharding/config/ds_keys.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "comm/core/error.h"
#include "sharding/io/text.h"

namespace rz::ds {
namespace {

using nlohmann::json;

constexpr KeySpec top_table[] = {
    {"train_batch_size", KeyRule::supported},
    {"train_micro_batch_size_per_gpu", KeyRule::supported},
    {"gradient_accumulation_steps", KeyRule::supported},
    {"gradient_clipping", KeyRule::supported},
    {"optimizer", KeyRule::supported},
    {"zero_optimization", KeyRule::supported},
    {"dataloader_drop_last", KeyRule::supported},
    {"scheduler", KeyRule::one_of, "[null]"},
    {"fp16", KeyRule::supported},
    {"bf16", KeyRule::supported},
    {"bfloat16", KeyRule::supported},
    {"amp", KeyRule::unsupported_feature},
    {"data_types", KeyRule::supported},
    {"communication_data_type", KeyRule::supported},
    {"seq_parallel_communication_data_type", KeyRule::ignored},
    {"fp32_allreduce", KeyRule::always_on},
    {"prescale_gradients", KeyRule::one_of, "[false]"},
    {"gradient_predivide_factor", KeyRule::one_of, "[1]"},
    {"sparse_gradients", KeyRule::one_of, "[false]"},
    {"steps_per_print", KeyRule::ignored},
    {"wall_clock_breakdown", KeyRule::ignored},
    {"memory_breakdown", KeyRule::ignored},
    {"dump_state", KeyRule::ignored},
    {"flops_profiler", KeyRule::ignored},
    {"comms_logger", KeyRule::ignored},
    {"csv_monitor", KeyRule::ignored},
    {"tensorboard", KeyRule::ignored},
    {"wandb", KeyRule::ignored},
    {"comet", KeyRule::ignored},
    {"monitor_config", KeyRule::ignored},
    {"timers", KeyRule::ignored},
    {"activation_checkpointing", KeyRule::ignored},
    {"checkpoint", KeyRule::ignored},
    {"aio", KeyRule::ignored},
    {"nebula", KeyRule::ignored},
    {"zero_allow_untested_optimizer", KeyRule::ignored},
    {"zero_force_ds_cpu_optimizer", KeyRule::ignored},
    {"use_data_before_expert_parallelism", KeyRule::ignored},
    {"load_universal_checkpoint", KeyRule::one_of, "[false]"},
    {"disable_allgather", KeyRule::one_of, "[false]"},
    {"compile", KeyRule::ignored},
    {"graph_harvesting", KeyRule::ignored},
    {"elasticity", KeyRule::unsupported_feature},
    {"curriculum_learning", KeyRule::unsupported_feature},
    {"data_efficiency", KeyRule::unsupported_feature},
    {"progressive_layer_drop", KeyRule::unsupported_feature},
    {"eigenvalue", KeyRule::unsupported_feature},
    {"autotuning", KeyRule::unsupported_feature},
    {"hybrid_engine", KeyRule::unsupported_feature},
    {"weight_quantization", KeyRule::unsupported_feature},
    {"compression_training", KeyRule::one_of, "[null, {}]"},
    {"sparse_attention", KeyRule::one_of, "[null]"},
    {"pipeline", KeyRule::one_of, "[null, {}]"},
    {"tensor_parallel", KeyRule::one_of, "[null, {}]"},
    {"ringzero", KeyRule::supported},
};

/// Keys that DeepSpeed does not have.
constexpr KeySpec ringzero_table[] = {
    {"decay_one_dimensional", KeyRule::supported},
    {"unused_parameters", KeyRule::supported},
};

constexpr KeySpec zero_table[] = {
    {"stage", KeyRule::supported},
    {"overlap_comm", KeyRule::supported},
    {"reduce_bucket_size", KeyRule::ignored},
    {"allgather_bucket_size", KeyRule::ignored},
    {"contiguous_gradients", KeyRule::always_on},
    {"reduce_scatter", KeyRule::always_on},
    {"allgather_partitions", KeyRule::always_on},
    {"load_from_fp32_weights", KeyRule::always_on},
    {"ignore_unused_parameters", KeyRule::always_on},
    {"sub_group_size", KeyRule::ignored},
    {"offload_param", KeyRule::unsupported_device},
    {"offload_optimizer", KeyRule::unsupported_device},
    {"stage3_prefetch_bucket_size", KeyRule::ignored},
    {"stage3_param_persistence_threshold", KeyRule::ignored},
    {"stage3_model_persistence_threshold", KeyRule::ignored},
    {"stage3_max_live_parameters", KeyRule::ignored},
    {"stage3_max_reuse_distance", KeyRule::ignored},
    {"stage3_gather_16bit_weights_on_model_save", KeyRule::ignored},
    {"stage3_module_granularity_threshold", KeyRule::ignored},
    {"leaf_module", KeyRule::ignored},
    {"stage3_use_all_reduce_for_fetch_params", KeyRule::ignored},
    {"zero_hpz_partition_size", KeyRule::one_of, "[1]"},
    {"zero_quantized_weights", KeyRule::one_of, "[false]"},
    {"zero_quantized_gradients", KeyRule::one_of, "[false]"},
    {"zero_quantized_nontrainable_weights", KeyRule::one_of, "[false]"},
    {"mics_shard_size", KeyRule::one_of, "[-1]"},
    {"mics_hierarchical_params_gather", KeyRule::one_of, "[false]"},
    {"round_robin_gradients", KeyRule::ignored},
    {"zeropp_loco_param", KeyRule::one_of, "[null]"},
    {"zenflow", KeyRule::one_of, "[null]"},
    {"elastic_checkpoint", KeyRule::deprecated, "leave it out"},
    {"legacy_stage1", KeyRule::deprecated, "leave it out"},
    {"cpu_offload", KeyRule::one_of, "[null, false]"},
    {"cpu_offload_params", KeyRule::one_of, "[null, false]"},
    {"cpu_offload_use_pin_memory", KeyRule::deprecated, "leave it out"},
    {"stage3_gather_fp16_weights_on_model_save", KeyRule::deprecated,
     "write stage3_gather_16bit_weights_on_model_save"},
    {"memory_efficient_linear", KeyRule::deprecated, "leave it out"},
    {"override_module_apply", KeyRule::deprecated, "leave it out"},
    {"use_multi_rank_bucket_allreduce", KeyRule::deprecated, "leave it out"},
    {"log_trace_cache_warnings", KeyRule::ignored},
};

constexpr KeySpec adam_table[] = {
    {"lr", KeyRule::supported},
    {"betas", KeyRule::supported},
    {"eps", KeyRule::supported},
    {"weight_decay", KeyRule::supported},
    {"torch_adam", KeyRule::supported},
    {"adam_w_mode", KeyRule::supported},
    {"bias_correction", KeyRule::one_of, "[true]"},
    {"amsgrad", KeyRule::one_of, "[false]"},
    {"maximize", KeyRule::one_of, "[false]"},
    {"fused", KeyRule::ignored},
    {"foreach", KeyRule::ignored},
    {"capturable", KeyRule::ignored},
    {"set_grad_none", KeyRule::ignored},
    {"fp32_optimizer_states", KeyRule::always_on},
};
constexpr KeySpec sgd_table[] = {
    {"lr", KeyRule::supported},
    {"momentum", KeyRule::supported},
    {"weight_decay", KeyRule::supported},
    {"nesterov", KeyRule::supported},
    {"dampening", KeyRule::one_of, "[0]"},
    {"maximize", KeyRule::one_of, "[false]"},
    {"foreach", KeyRule::ignored},
    {"fused", KeyRule::ignored},
};
constexpr KeySpec optimizer_table[] = {
    {"type", KeyRule::supported}, {"params", KeyRule::supported}, {"legacy_fusion", KeyRule::ignored}};

constexpr KeySpec fp16_table[] = {
    {"enabled", KeyRule::supported},
    {"loss_scale", KeyRule::supported},
    {"initial_scale_power", KeyRule::supported},
    {"loss_scale_window", KeyRule::supported},
    {"hysteresis", KeyRule::supported},
    {"consecutive_hysteresis", KeyRule::supported},
    {"min_loss_scale", KeyRule::supported},
    {"auto_cast", KeyRule::one_of, "[false]"},
    {"fp16_master_weights_and_grads", KeyRule::one_of, "[false]"},
};
constexpr KeySpec bf16_table[] = {
    {"enabled", KeyRule::supported},
    {"check_grad_overflow", KeyRule::supported},
    {"immediate_grad_update", KeyRule::ignored},
    {"bf16_master_weights_and_grads", KeyRule::one_of, "[false]"},
    {"bf16_optimizer_states", KeyRule::one_of, "[false]"},
};
constexpr KeySpec data_types_table[] = {{"grad_accum_dtype", KeyRule::supported}};

std::vector<std::string> names_of(std::span<const KeySpec> table) {
  std::vector<std::string> names;
  for (const auto& k : table) names.emplace_back(k.key);
  return names;
}

[[noreturn]] void refuse_unknown(const JsonObject& object, const std::string& key,
                                 std::span<const KeySpec> table) {
  const std::string near = nearest_name(key, names_of(table));
  object.fail_at(key,
                 near.empty() ? "unknown key; remove it" : concat("unknown key; did you mean '", near, "'?"));
}

}  // namespace

std::span<const KeySpec> top_keys() { return top_table; }
std::span<const KeySpec> zero_keys() { return zero_table; }
std::span<const KeySpec> optimizer_keys() { return optimizer_table; }
std::span<const KeySpec> adam_keys() { return adam_table; }
std::span<const KeySpec> sgd_keys() { return sgd_table; }
std::span<const KeySpec> fp16_keys() { return fp16_table; }
std::span<const KeySpec> bf16_keys() { return bf16_table; }
std::span<const KeySpec> data_types_keys() { return data_types_table; }
std::span<const KeySpec> ringzero_keys() { return ringzero_table; }

void KeyValidator::validate(const JsonObject& object, std::span<const KeySpec> table) {
  for (const auto& key : object.keys()) {
    const auto known = std::ranges::find_if(table, [&](const KeySpec& k) { return key == k.key; });
    if (known == table.end()) refuse_unknown(object, key, table);
    apply(object, *known);
  }
}

void KeyValidator::refuse(const JsonObject& object, const std::string& key, const std::string& value,
                          const std::string& advice) const {
  fail(Errc::unsupported, escaped(concat(file_, ": ", object.path(key),
                                         ": not supported in this build yet: ", value, "; ", advice)));
}

void KeyValidator::warn(const JsonObject& object, const char* key, const std::string& what) {
  warnings_.push_back(concat(file_, ": ", object.path(key), ": ", what));
}

void KeyValidator::apply(const JsonObject& object, const KeySpec& k) {
  switch (k.rule) {
    case KeyRule::supported:
      return;
    case KeyRule::ignored:
      return warn(object, k.key, "has no effect in this build");
    case KeyRule::always_on:
      if (object.at(k.key) != true) warn(object, k.key, "has no effect: this is always on");
      return;
    case KeyRule::deprecated:
      return warn(object, k.key, concat("obsolete and without effect; ", k.values));
    case KeyRule::one_of:
      return apply_one_of(object, k);
    case KeyRule::unsupported_feature:
      return apply_feature(object, k.key);
    case KeyRule::unsupported_device:
      return apply_device(object, k.key);
  }
}

void KeyValidator::apply_one_of(const JsonObject& object, const KeySpec& k) const {
  const json accepted = json::parse(k.values);
  const json& value = object.at(k.key);
  if (std::ranges::find(accepted, value) == accepted.end())
    refuse(object, k.key, to_display(value), "remove the key");
}

void KeyValidator::apply_feature(const JsonObject& object, const char* key) const {
  if (object.at(key).is_null()) return;
  const JsonObject feature = object.object(key);
  if (feature.boolean("enabled", false)) refuse(feature, "enabled", "true", "set it to false");
}

void KeyValidator::apply_device(const JsonObject& object, const char* key) const {
  if (object.at(key).is_null()) return;
  const JsonObject offload = object.object(key);
  const std::string device = offload.text("device", "none");
  if (device != "none") refuse(offload, "device", '"' + device + '"', "use \"none\"");
}

}  // namespace rz::ds
