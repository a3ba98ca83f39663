#include "sharding/ds_keys.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "comm/core/error.h"
#include "sharding/text.h"

namespace rz::ds {
namespace {

using nlohmann::json;

constexpr Known top_table[] = {
    {"train_batch_size", Rule::honoured},
    {"train_micro_batch_size_per_gpu", Rule::honoured},
    {"gradient_accumulation_steps", Rule::honoured},
    {"gradient_clipping", Rule::honoured},
    {"optimizer", Rule::honoured},
    {"zero_optimization", Rule::honoured},
    {"dataloader_drop_last", Rule::honoured},
    {"scheduler", Rule::only, "[null]"},
    {"fp16", Rule::honoured},
    {"bf16", Rule::honoured},
    {"bfloat16", Rule::honoured},
    {"amp", Rule::feature},
    {"data_types", Rule::honoured},
    {"communication_data_type", Rule::honoured},
    {"seq_parallel_communication_data_type", Rule::harmless},
    {"fp32_allreduce", Rule::always},
    {"prescale_gradients", Rule::only, "[false]"},
    {"gradient_predivide_factor", Rule::only, "[1]"},
    {"sparse_gradients", Rule::only, "[false]"},
    {"steps_per_print", Rule::harmless},
    {"wall_clock_breakdown", Rule::harmless},
    {"memory_breakdown", Rule::harmless},
    {"dump_state", Rule::harmless},
    {"flops_profiler", Rule::harmless},
    {"comms_logger", Rule::harmless},
    {"csv_monitor", Rule::harmless},
    {"tensorboard", Rule::harmless},
    {"wandb", Rule::harmless},
    {"comet", Rule::harmless},
    {"monitor_config", Rule::harmless},
    {"timers", Rule::harmless},
    {"activation_checkpointing", Rule::harmless},
    {"checkpoint", Rule::harmless},
    {"aio", Rule::harmless},
    {"nebula", Rule::harmless},
    {"zero_allow_untested_optimizer", Rule::harmless},
    {"zero_force_ds_cpu_optimizer", Rule::harmless},
    {"use_data_before_expert_parallelism", Rule::harmless},
    {"load_universal_checkpoint", Rule::only, "[false]"},
    {"disable_allgather", Rule::only, "[false]"},
    {"compile", Rule::harmless},
    {"graph_harvesting", Rule::harmless},
    {"elasticity", Rule::feature},
    {"curriculum_learning", Rule::feature},
    {"data_efficiency", Rule::feature},
    {"progressive_layer_drop", Rule::feature},
    {"eigenvalue", Rule::feature},
    {"autotuning", Rule::feature},
    {"hybrid_engine", Rule::feature},
    {"weight_quantization", Rule::feature},
    {"compression_training", Rule::only, "[null, {}]"},
    {"sparse_attention", Rule::only, "[null]"},
    {"pipeline", Rule::only, "[null, {}]"},
    {"tensor_parallel", Rule::only, "[null, {}]"},
    {"ringzero", Rule::honoured},
};

/// Our own: what DeepSpeed has no key for.
constexpr Known ringzero_table[] = {
    {"decay_one_dimensional", Rule::honoured},
    {"unreached_parameters", Rule::honoured},
};

constexpr Known zero_table[] = {
    {"stage", Rule::honoured},
    {"overlap_comm", Rule::honoured},
    {"reduce_bucket_size", Rule::harmless},
    {"allgather_bucket_size", Rule::harmless},
    {"contiguous_gradients", Rule::always},
    {"reduce_scatter", Rule::always},
    {"allgather_partitions", Rule::always},
    {"load_from_fp32_weights", Rule::always},
    {"ignore_unused_parameters", Rule::always},
    {"sub_group_size", Rule::harmless},
    {"offload_param", Rule::device},
    {"offload_optimizer", Rule::device},
    {"stage3_prefetch_bucket_size", Rule::harmless},
    {"stage3_param_persistence_threshold", Rule::harmless},
    {"stage3_model_persistence_threshold", Rule::harmless},
    {"stage3_max_live_parameters", Rule::harmless},
    {"stage3_max_reuse_distance", Rule::harmless},
    {"stage3_gather_16bit_weights_on_model_save", Rule::harmless},
    {"stage3_module_granularity_threshold", Rule::harmless},
    {"leaf_module", Rule::harmless},
    {"stage3_use_all_reduce_for_fetch_params", Rule::harmless},
    {"zero_hpz_partition_size", Rule::only, "[1]"},
    {"zero_quantized_weights", Rule::only, "[false]"},
    {"zero_quantized_gradients", Rule::only, "[false]"},
    {"zero_quantized_nontrainable_weights", Rule::only, "[false]"},
    {"mics_shard_size", Rule::only, "[-1]"},
    {"mics_hierarchical_params_gather", Rule::only, "[false]"},
    {"round_robin_gradients", Rule::harmless},
    {"zeropp_loco_param", Rule::only, "[null]"},
    {"zenflow", Rule::only, "[null]"},
    {"elastic_checkpoint", Rule::obsolete, "leave it out"},
    {"legacy_stage1", Rule::obsolete, "leave it out"},
    {"cpu_offload", Rule::only, "[null, false]"},
    {"cpu_offload_params", Rule::only, "[null, false]"},
    {"cpu_offload_use_pin_memory", Rule::obsolete, "leave it out"},
    {"stage3_gather_fp16_weights_on_model_save", Rule::obsolete,
     "write stage3_gather_16bit_weights_on_model_save"},
    {"memory_efficient_linear", Rule::obsolete, "leave it out"},
    {"override_module_apply", Rule::obsolete, "leave it out"},
    {"use_multi_rank_bucket_allreduce", Rule::obsolete, "leave it out"},
    {"log_trace_cache_warnings", Rule::harmless},
};

constexpr Known adam_table[] = {
    {"lr", Rule::honoured},
    {"betas", Rule::honoured},
    {"eps", Rule::honoured},
    {"weight_decay", Rule::honoured},
    {"torch_adam", Rule::honoured},
    {"adam_w_mode", Rule::honoured},
    {"bias_correction", Rule::only, "[true]"},
    {"amsgrad", Rule::only, "[false]"},
    {"maximize", Rule::only, "[false]"},
    {"fused", Rule::harmless},
    {"foreach", Rule::harmless},
    {"capturable", Rule::harmless},
    {"set_grad_none", Rule::harmless},
    {"fp32_optimizer_states", Rule::always},
};
constexpr Known sgd_table[] = {
    {"lr", Rule::honoured},       {"momentum", Rule::honoured},     {"weight_decay", Rule::honoured},
    {"nesterov", Rule::honoured}, {"dampening", Rule::only, "[0]"}, {"maximize", Rule::only, "[false]"},
    {"foreach", Rule::harmless},  {"fused", Rule::harmless},
};
constexpr Known optimizer_table[] = {
    {"type", Rule::honoured}, {"params", Rule::honoured}, {"legacy_fusion", Rule::harmless}};

constexpr Known fp16_table[] = {
    {"enabled", Rule::honoured},
    {"loss_scale", Rule::honoured},
    {"initial_scale_power", Rule::honoured},
    {"loss_scale_window", Rule::honoured},
    {"hysteresis", Rule::honoured},
    {"consecutive_hysteresis", Rule::honoured},
    {"min_loss_scale", Rule::honoured},
    {"auto_cast", Rule::only, "[false]"},
    {"fp16_master_weights_and_grads", Rule::only, "[false]"},
};
constexpr Known bf16_table[] = {
    {"enabled", Rule::honoured},
    {"check_grad_overflow", Rule::honoured},
    {"immediate_grad_update", Rule::harmless},
    {"bf16_master_weights_and_grads", Rule::only, "[false]"},
    {"bf16_optimizer_states", Rule::only, "[false]"},
};
constexpr Known data_types_table[] = {{"grad_accum_dtype", Rule::honoured}};

std::vector<std::string> names_of(std::span<const Known> table) {
  std::vector<std::string> names;
  for (const auto& k : table) names.emplace_back(k.key);
  return names;
}

[[noreturn]] void refuse_unknown(const JsonObject& object, const std::string& key,
                                 std::span<const Known> table) {
  const std::string near = nearest_name(key, names_of(table));
  object.fail_at(key,
                 near.empty() ? "unknown key; remove it" : str("unknown key; did you mean '", near, "'?"));
}

}  // namespace

std::span<const Known> top_keys() { return top_table; }
std::span<const Known> zero_keys() { return zero_table; }
std::span<const Known> optimizer_keys() { return optimizer_table; }
std::span<const Known> adam_keys() { return adam_table; }
std::span<const Known> sgd_keys() { return sgd_table; }
std::span<const Known> fp16_keys() { return fp16_table; }
std::span<const Known> bf16_keys() { return bf16_table; }
std::span<const Known> data_types_keys() { return data_types_table; }
std::span<const Known> ringzero_keys() { return ringzero_table; }

void Judge::run(const JsonObject& object, std::span<const Known> table) {
  for (const auto& key : object.keys()) {
    const auto known = std::ranges::find_if(table, [&](const Known& k) { return key == k.key; });
    if (known == table.end()) refuse_unknown(object, key, table);
    apply(object, *known);
  }
}

void Judge::refuse(const JsonObject& object, const std::string& key, const std::string& value,
                   const std::string& advice) const {
  fail(Errc::unsupported, escaped(str(file_, ": ", object.path(key),
                                      ": not supported in this build yet: ", value, "; ", advice)));
}

void Judge::warn(const JsonObject& object, const char* key, const std::string& what) {
  warnings_.push_back(str(file_, ": ", object.path(key), ": ", what));
}

void Judge::apply(const JsonObject& object, const Known& k) {
  switch (k.rule) {
    case Rule::honoured:
      return;
    case Rule::harmless:
      return warn(object, k.key, "has no effect in this build");
    case Rule::always:
      if (object.at(k.key) != true) warn(object, k.key, "has no effect: this is always on");
      return;
    case Rule::obsolete:
      return warn(object, k.key, str("obsolete and without effect; ", k.values));
    case Rule::only:
      return apply_only(object, k);
    case Rule::feature:
      return apply_feature(object, k.key);
    case Rule::device:
      return apply_device(object, k.key);
  }
}

void Judge::apply_only(const JsonObject& object, const Known& k) const {
  const json accepted = json::parse(k.values);
  const json& value = object.at(k.key);
  if (std::ranges::find(accepted, value) == accepted.end())
    refuse(object, k.key, shown(value), "remove the key");
}

void Judge::apply_feature(const JsonObject& object, const char* key) const {
  if (object.at(key).is_null()) return;
  const JsonObject feature = object.object(key);
  if (feature.boolean("enabled", false)) refuse(feature, "enabled", "true", "set it to false");
}

void Judge::apply_device(const JsonObject& object, const char* key) const {
  if (object.at(key).is_null()) return;
  const JsonObject offload = object.object(key);
  const std::string device = offload.text("device", "none");
  if (device != "none") refuse(offload, "device", '"' + device + '"', "use \"none\"");
}

}  // namespace rz::ds
