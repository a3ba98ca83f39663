#include "sharding/ds_config.h"

#include <algorithm>
#include <cctype>
#include <limits>
#include <nlohmann/json.hpp>
#include <span>
#include <tuple>

#include "comm/core/error.h"
#include "sharding/json.h"

namespace rz {
namespace {

using nlohmann::json;

/// What becomes of a known key.
enum class Rule {
  honoured,  ///< read elsewhere
  harmless,  ///< changes no result: accepted with a warning
  always,    ///< true is what is done anyway; other values are harmless
  only,      ///< accepted with one of `values`, else not supported yet
  feature,   ///< an object that may say "enabled": true, which is not supported yet
  device,    ///< an object whose "device" must be "none"
  obsolete,  ///< accepted with a warning that says what to write instead
};

struct Known {
  const char* key;
  Rule rule;
  const char* values = "";  ///< only: a JSON list; obsolete: the advice
};

constexpr Known top_keys[] = {
    {"train_batch_size", Rule::honoured},
    {"train_micro_batch_size_per_gpu", Rule::honoured},
    {"gradient_accumulation_steps", Rule::honoured},
    {"gradient_clipping", Rule::honoured},
    {"optimizer", Rule::honoured},
    {"zero_optimization", Rule::honoured},
    {"dataloader_drop_last", Rule::honoured},
    {"scheduler", Rule::only, "[null]"},
    {"fp16", Rule::feature},
    {"bf16", Rule::feature},
    {"bfloat16", Rule::feature},
    {"amp", Rule::feature},
    {"data_types", Rule::only, R"([null, {}, {"grad_accum_dtype": null}, {"grad_accum_dtype": "fp32"}])"},
    {"communication_data_type", Rule::only, R"([null, "fp32"])"},
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
};

constexpr Known zero_keys[] = {
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

constexpr Known adam_keys[] = {
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
constexpr Known sgd_keys[] = {
    {"lr", Rule::honoured},       {"momentum", Rule::honoured},     {"weight_decay", Rule::honoured},
    {"nesterov", Rule::honoured}, {"dampening", Rule::only, "[0]"}, {"maximize", Rule::only, "[false]"},
    {"foreach", Rule::harmless},  {"fused", Rule::harmless},
};
constexpr Known optimizer_keys[] = {
    {"type", Rule::honoured}, {"params", Rule::honoured}, {"legacy_fusion", Rule::harmless}};

std::vector<std::string> names_of(std::span<const Known> table) {
  std::vector<std::string> names;
  for (const auto& k : table) names.emplace_back(k.key);
  return names;
}

/// Judges the keys of one object by its table.
class Judge {
 public:
  Judge(const DsConfig& config, std::vector<std::string>& warnings) : config_(config), warnings_(warnings) {}

  void run(const JsonObject& object, std::span<const Known> table) {
    for (const auto& key : object.keys()) {
      const auto known = std::ranges::find_if(table, [&](const Known& k) { return key == k.key; });
      if (known == table.end()) refuse_unknown(object, key, table);
      apply(object, *known);
    }
  }

 private:
  [[noreturn]] static void refuse_unknown(const JsonObject& object, const std::string& key,
                                          std::span<const Known> table) {
    const std::string near = nearest_name(key, names_of(table));
    object.fail_at(key,
                   near.empty() ? "unknown key; remove it" : str("unknown key; did you mean '", near, "'?"));
  }

  [[noreturn]] void refuse(const JsonObject& object, const std::string& key, const std::string& value,
                           const std::string& advice) const {
    fail(Errc::unsupported, config_.file, ": ", object.path(key),
         ": not supported in this build yet: ", value, "; ", advice);
  }

  void warn(const JsonObject& object, const char* key, const std::string& what) {
    warnings_.push_back(str(config_.file, ": ", object.path(key), ": ", what));
  }

  void apply(const JsonObject& object, const Known& k) {
    const json& value = object.at(k.key);
    switch (k.rule) {
      case Rule::honoured:
        return;
      case Rule::harmless:
        return warn(object, k.key, "has no effect in this build");
      case Rule::always:
        if (value != true) warn(object, k.key, "has no effect: this is always on");
        return;
      case Rule::obsolete:
        return warn(object, k.key, str("obsolete and without effect; ", k.values));
      case Rule::only:
        return apply_only(object, k, value);
      case Rule::feature:
        return apply_feature(object, k.key);
      case Rule::device:
        return apply_device(object, k.key);
    }
  }

  void apply_only(const JsonObject& object, const Known& k, const json& value) const {
    const json accepted = json::parse(k.values);
    if (std::ranges::find(accepted, value) == accepted.end())
      refuse(object, k.key, shown(value), "remove the key");
  }

  void apply_feature(const JsonObject& object, const char* key) const {
    if (object.at(key).is_null()) return;
    const JsonObject feature = object.object(key);
    if (feature.boolean("enabled", false)) refuse(feature, "enabled", "true", "set it to false");
  }

  void apply_device(const JsonObject& object, const char* key) const {
    if (object.at(key).is_null()) return;
    const JsonObject offload = object.object(key);
    const std::string device = offload.text("device", "none");
    if (device != "none") refuse(offload, "device", '"' + device + '"', "use \"none\"");
  }

  const DsConfig& config_;
  std::vector<std::string>& warnings_;
};

/// Hugging Face's "auto" leaves a value to the runtime: here it means the default.
void drop_auto(json& node, const std::string& path, DsConfig& config) {
  for (auto it = node.begin(); it != node.end();) {
    const std::string here = path + (path.empty() ? "" : ".") + it.key();
    if (it->is_object()) drop_auto(*it, here, config);
    if (*it == "auto") {
      config.warnings.push_back(str(config.file, ": ", here, ": \"auto\" is taken as if it were not given"));
      it = node.erase(it);
    } else {
      ++it;
    }
  }
}

constexpr double unbounded = std::numeric_limits<double>::max();

std::string lower(std::string text) {
  std::ranges::transform(text, text.begin(), [](unsigned char c) { return std::tolower(c); });
  return text;
}

void read_adam(const JsonObject& params, OptimizerConfig& o) {
  o.eps = params.number("eps", o.eps, 0, unbounded);
  if (!params.has("betas")) return;
  const json& betas = params.at("betas");
  const auto valid = [](const json& b) {
    return b.is_number() && b.get<double>() >= 0 && b.get<double>() < 1;
  };
  if (!betas.is_array() || betas.size() != 2 || !valid(betas[0]) || !valid(betas[1]))
    params.fail_at("betas", str("expected two numbers from 0 to below 1, found ", shown(betas)));
  o.beta1 = betas[0].get<double>();
  o.beta2 = betas[1].get<double>();
}

void read_sgd(const JsonObject& params, OptimizerConfig& o) {
  o.momentum = params.number("momentum", 0, 0, unbounded);
  o.nesterov = params.boolean("nesterov", false);
  if (o.nesterov && o.momentum == 0) params.fail_at("nesterov", "needs a momentum above 0");
}

OptimizerConfig::Type read_type(const JsonObject& optimizer, const std::string& file) {
  const std::string type = optimizer.text("type", "");
  const std::string low = lower(type);
  if (low == "adamw") return OptimizerConfig::Type::adamw;
  if (low == "adam") return OptimizerConfig::Type::adam;
  if (low == "sgd") return OptimizerConfig::Type::sgd;
  if (type.empty()) optimizer.fail_at("type", "missing; choose Adam, AdamW or SGD");
  for (const char* later : {"lion", "lamb", "adagrad", "muon", "onebitadam", "zerooneadam", "onebitlamb"})
    if (low == later)
      fail(Errc::unsupported, file, ": ", optimizer.path("type"), ": not supported in this build yet: ", type,
           "; choose Adam, AdamW or SGD");
  optimizer.fail_at("type", str("unknown optimizer \"", type, "\"; choose Adam, AdamW or SGD"));
}

void read_optimizer(const JsonObject& root, Judge& judge, DsConfig& config) {
  if (!root.has("optimizer")) {
    config.warnings.push_back(str(config.file, ": optimizer: not given; AdamW with lr 0.001 is used"));
    return;
  }
  const JsonObject optimizer = root.object("optimizer");
  judge.run(optimizer, optimizer_keys);
  OptimizerConfig& o = config.optimizer;
  o.type = read_type(optimizer, config.file);
  if (!optimizer.has("params")) return;
  const JsonObject params = optimizer.object("params");
  const bool sgd = o.type == OptimizerConfig::Type::sgd;
  judge.run(params, sgd ? std::span<const Known>(sgd_keys) : std::span<const Known>(adam_keys));
  o.lr = params.number("lr", o.lr, 0, unbounded);
  o.weight_decay = params.number("weight_decay", 0, 0, unbounded);
  if (sgd) return read_sgd(params, o);
  read_adam(params, o);
  params.boolean("torch_adam", false);
  // DeepSpeed: "Adam" decouples the decay too, unless adam_w_mode is off; "AdamW" always does.
  const bool decoupled = params.boolean("adam_w_mode", true) || o.type == OptimizerConfig::Type::adamw;
  if (o.type == OptimizerConfig::Type::adam && decoupled && o.weight_decay != 0 && !params.has("adam_w_mode"))
    config.warnings.push_back(
        str(config.file, ": ", optimizer.path("type"),
            ": Adam decays weights as AdamW does; \"adam_w_mode\": false adds the decay to "
            "the gradient instead"));
  o.type = decoupled ? OptimizerConfig::Type::adamw : OptimizerConfig::Type::adam;
}

std::optional<std::int64_t> read_size(const JsonObject& root, const char* key, int bits = 20) {
  if (!root.has(key)) return std::nullopt;
  return root.integer(key, 0, 1, std::int64_t{1} << bits);
}

}  // namespace

const char* name(OptimizerConfig::Type type) {
  switch (type) {
    case OptimizerConfig::Type::adam:
      return "Adam";
    case OptimizerConfig::Type::adamw:
      return "AdamW";
    case OptimizerConfig::Type::sgd:
      return "SGD";
  }
  return "?";
}

DsConfig parse_ds_config(std::string_view text, const std::string& file) {
  DsConfig config;
  config.file = file;
  json document = parse_json(text, file, JsonDialect::relaxed);
  if (document.is_object()) drop_auto(document, "", config);
  const JsonObject root(document, file);
  Judge judge(config, config.warnings);
  judge.run(root, top_keys);
  config.train_batch_size = read_size(root, "train_batch_size", 40);
  config.train_micro_batch_size_per_gpu = read_size(root, "train_micro_batch_size_per_gpu");
  config.gradient_accumulation_steps = read_size(root, "gradient_accumulation_steps");
  config.gradient_clipping = root.number("gradient_clipping", 0, 0, unbounded);
  config.drop_last = root.boolean("dataloader_drop_last", false);
  read_optimizer(root, judge, config);
  if (root.has("zero_optimization")) {
    const JsonObject zero = root.object("zero_optimization");
    judge.run(zero, zero_keys);
    config.zero_stage = static_cast<int>(zero.integer("stage", 0, 0, 3));
    if (!zero.has("overlap_comm") || !zero.at("overlap_comm").is_null())
      config.overlap_comm = zero.boolean("overlap_comm", true);
  }
  return config;
}

DsConfig read_ds_config(const std::string& path) { return parse_ds_config(read_text_file(path), path); }

namespace {

/// whole / parts, exactly; `key` is what the caller gave and would change.
std::int64_t divide(const DsConfig& c, const char* key, std::int64_t whole, const std::string& parts_text,
                    std::int64_t parts) {
  const std::int64_t below = whole / parts * parts;
  require(whole % parts == 0, Errc::config, c.file, ": ", key, ": ", whole,
          " cannot be shared out evenly over ", parts_text, "; use ", below > 0 ? str(below, " or ") : "",
          below + parts, ", or another number of ranks");
  return whole / parts;
}

}  // namespace

BatchSizes resolve_batch(const DsConfig& c, int ranks) {
  const auto& [train, micro, accumulation] =
      std::tie(c.train_batch_size, c.train_micro_batch_size_per_gpu, c.gradient_accumulation_steps);
  const std::string world = str(ranks, ranks == 1 ? " rank" : " ranks");
  if (train && micro) {
    const std::int64_t parts = *micro * ranks;
    const std::string text = str(world, " × train_micro_batch_size_per_gpu ", *micro);
    if (!accumulation) return {*train, *micro, divide(c, "train_batch_size", *train, text, parts)};
    require(*train == parts * *accumulation, Errc::config, c.file, ": train_batch_size: ", *train, " is not ",
            text, " × gradient_accumulation_steps ", *accumulation, " = ", parts * *accumulation,
            "; remove one of the three, or make them agree");
    return {*train, *micro, *accumulation};
  }
  if (train) {
    const std::int64_t steps = accumulation.value_or(1);
    const std::string text = steps == 1 ? world : str(world, " × gradient_accumulation_steps ", steps);
    return {*train, divide(c, "train_batch_size", *train, text, steps * ranks), steps};
  }
  require(micro.has_value(), Errc::config, c.file,
          ": train_batch_size: missing; give train_batch_size or train_micro_batch_size_per_gpu");
  const std::int64_t steps = accumulation.value_or(1);
  return {*micro * steps * ranks, *micro, steps};
}

std::string resolved_json(const DsConfig& c, const BatchSizes& batch) {
  const OptimizerConfig& o = c.optimizer;
  nlohmann::ordered_json params{{"lr", o.lr}, {"weight_decay", o.weight_decay}};
  if (o.type == OptimizerConfig::Type::sgd) {
    params["momentum"] = o.momentum;
    params["nesterov"] = o.nesterov;
  } else {
    params["betas"] = {o.beta1, o.beta2};
    params["eps"] = o.eps;
    params["adam_w_mode"] = o.type == OptimizerConfig::Type::adamw;
  }
  const nlohmann::ordered_json all{
      {"train_batch_size", batch.train},
      {"train_micro_batch_size_per_gpu", batch.micro},
      {"gradient_accumulation_steps", batch.accumulation},
      {"gradient_clipping", c.gradient_clipping},
      {"dataloader_drop_last", c.drop_last},
      {"optimizer", {{"type", name(o.type)}, {"params", params}}},
      {"zero_optimization", {{"stage", c.zero_stage}, {"overlap_comm", c.overlap_comm}}},
  };
  return all.dump(2) + "\n";
}

}  // namespace rz
