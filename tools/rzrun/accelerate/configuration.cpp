#include "tools/rzrun/accelerate/configuration.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "comm/core/error.h"
#include "comm/core/text.h"
#include "tools/rzrun/hosts/hosts.h"

namespace rz::accelerate {
namespace {

using Json = nlohmann::ordered_json;

struct Type {
  std::string_view names;
  Method method;
  std::string_view instead{};  ///< not empty: they are refused
};
constexpr Type types[] = {
    {"NO", Method::single},
    {"MULTI_GPU MULTI_CPU TP", Method::data_parallel},
    {"DEEPSPEED", Method::deepspeed},
    {"FSDP", Method::fsdp},
    {"MULTI_XPU MULTI_NPU MULTI_MLU MULTI_SDAA MULTI_MUSA MULTI_HPU MULTI_NEURON XLA TPU", Method::single,
     "devices are CUDA's, or none; use MULTI_GPU or MULTI_CPU"},
    {"MEGATRON_LM", Method::single,
     "Megatron-LM is not started; use FSDP or DEEPSPEED, with parallelism_config_tp_size"},
    {"DATA_PARALLEL", Method::single, "jobs on SageMaker are not started; use MULTI_GPU"},
    {"MODEL_PARALLEL", Method::single, "jobs on SageMaker are not started; use FSDP"},
};

/// An integer or a number, or "auto".
void put_number(Json& json, const Values& v, const char* key, bool whole) {
  if (!v.has(key)) return;
  if (v.text(key) == "auto")
    json[key] = "auto";
  else if (whole)
    json[key] = *v.integer(key, 1, 1000000000);
  else
    json[key] = *v.number(key);
}

/// Passes of an update and clipping, which any method has.
void put_sizes(Json& json, const Values& v) {
  json["train_batch_size"] = "auto";
  json["train_micro_batch_size_per_gpu"] = "auto";
  json["gradient_accumulation_steps"] = "auto";
  json["gradient_clipping"] = "auto";
  put_number(json, v, "gradient_accumulation_steps", true);
  put_number(json, v, "gradient_clipping", false);
}

/// "no", "bf16" or "fp16".
std::string precision_of(const Values& v) {
  if (!v.has("mixed_precision")) return v.boolean("fp16") ? "fp16" : "no";
  if (truth_of(*v.text("mixed_precision")) == false) return "no";
  const std::string found = *v.word("mixed_precision", {"no", "bf16", "fp16", "fp8"});
  require(found != "fp8", Errc::config, v.where("mixed_precision"),
          ": fp8 is not supported; use bf16, or fp16 on devices without it");
  return found;
}

/// DeepSpeed trains 16-bit parameters; the others compute products in 16 bits, as torch.autocast.
void put_precision(Json& json, const Values& v, Method method) {
  const std::string precision = precision_of(v);
  if (precision == "no") return;
  if (method == Method::deepspeed)
    json[precision] = {{"enabled", true}};
  else
    json["torch_autocast"] = {{"enabled", true}, {"dtype", precision}};
}

void put_offload(Json& zero, const Values& v, const char* key, const char* section) {
  const auto device = v.word(key, {"none", "cpu", "nvme"});
  require(device != "nvme", Errc::config, v.where(key),
          ": nvme is not supported, offload is to host memory; use cpu");
  if (device == "cpu") zero[section] = {{"device", "cpu"}};
}

std::string deepspeed_file(const Values& v) {
  const std::string path = *v.text("deepspeed_config_file"), &where = v.where("deepspeed_config_file");
  for (const char* key : {"zero_stage", "gradient_accumulation_steps", "gradient_clipping",
                          "offload_optimizer_device", "offload_param_device", "zero3_save_16bit_model"})
    require(!v.has(key) || v.text(key) == "auto" || v.text(key) == "none", Errc::config, v.where(key),
            ": deepspeed_config_file ", path, " decides; set it there, and remove it here");
  require(precision_of(v) == "no", Errc::config,
          v.where(v.has("mixed_precision") ? "mixed_precision" : "fp16"), ": deepspeed_config_file ", path,
          " decides; set ", precision_of(v), ".enabled there, and remove it here");
  require(std::filesystem::is_regular_file(path), Errc::config, where, ": there is no file ",
          hosts::quoted(path), "; a path is relative to the folder where rzrun is started");
  return path;
}

Json deepspeed_json(const Values& v) {
  Json json = Json::object(), zero = Json::object();
  put_sizes(json, v);
  zero["stage"] = v.integer("zero_stage", 0, 3).value_or(2);
  put_offload(zero, v, "offload_optimizer_device", "offload_optimizer");
  put_offload(zero, v, "offload_param_device", "offload_param");
  if (v.boolean("zero3_save_16bit_model")) zero["stage3_gather_16bit_weights_on_model_save"] = true;
  json["zero_optimization"] = zero;
  return json;
}

struct Sharding {
  int stage = 3;
  bool hybrid = false;
};

Sharding sharding_of(const Values& v) {
  static constexpr Sharding meaning[] = {{3, false}, {2, false}, {0, false}, {3, true}, {2, true}};
  const std::vector<std::string> words{
      "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "1", "2", "3", "4",
      "5"};
  v.integer("fsdp_version", 1, 2);
  Sharding found;
  if (const auto strategy = v.word("fsdp_sharding_strategy", words))
    found = meaning[(std::ranges::find(words, *strategy) - words.begin()) % 5];
  const auto reshard = v.text("fsdp_reshard_after_forward");
  if (!reshard) return found;
  if (const auto truth = truth_of(*reshard)) {
    if (!*truth && found.stage == 3) found.stage = 2;
  } else if (!v.has("fsdp_sharding_strategy")) {  // version 1 has a strategy here
    found =
        meaning[(std::ranges::find(words, *v.word("fsdp_reshard_after_forward", words)) - words.begin()) % 5];
  }
  return found;
}

Json fsdp_json(const Values& v) {
  Json json = Json::object(), zero = Json::object();
  put_sizes(json, v);
  const Sharding sharding = sharding_of(v);
  zero["stage"] = sharding.stage;
  if (v.boolean("fsdp_offload_params")) {
    require(sharding.stage > 0, Errc::config, v.where("fsdp_offload_params"),
            ": needs values that are divided; set fsdp_sharding_strategy FULL_SHARD");
    zero["offload_optimizer"] = {{"device", "cpu"}};
    if (sharding.stage == 3) zero["offload_param"] = {{"device", "cpu"}};
  }
  json["zero_optimization"] = zero;
  if (v.boolean("fsdp_activation_checkpointing"))
    json["activation_checkpointing"] = {{"partition_activations", true}};
  if (sharding.hybrid) json["ringzero"]["mesh"] = {{"replicate", "auto"}, {"shard", "auto"}};
  return json;
}

void put_mesh(Json& json, const Values& v) {
  for (const char* key : {"parallelism_config_cp_size", "parallelism_config_sp_size"})
    require(v.integer(key, 1, hosts::max_nodes).value_or(1) == 1, Errc::config, v.where(key),
            ": sequences are not divided between ranks; set 1, or parallelism_config_tp_size");
  const auto put = [&](const char* key, const char* dimension) {
    if (const auto size = v.integer(key, 1, hosts::max_nodes)) json["ringzero"]["mesh"][dimension] = *size;
  };
  put("parallelism_config_dp_replicate_size", "replicate");
  put("parallelism_config_dp_shard_size", "shard");
  put("tp_size", "tp");
  put("parallelism_config_tp_size", "tp");
}

void refuse_other_blocks(const Values& v, Method method) {
  const auto refuse = [&](std::string_view block, const char* type) {
    const Value* const found = v.first_of_block(block);
    require(!found, Errc::config, found ? found->where : "", ": distributed_type is not ", type,
            ", so nothing reads ", block, "; set that type, or remove the block");
  };
  if (method != Method::deepspeed) refuse("deepspeed_config", "DEEPSPEED");
  if (method != Method::fsdp) refuse("fsdp_config", "FSDP");
}

}  // namespace

Method method_of(const Values& v) {
  if (v.boolean("use_deepspeed")) return Method::deepspeed;
  if (v.boolean("use_fsdp")) return Method::fsdp;
  if (v.boolean("multi_gpu")) return Method::data_parallel;
  if (const auto found = v.text("distributed_type")) {
    if (truth_of(*found) == false) return Method::single;
    const Type* const type = std::ranges::find_if(
        types, [&](const Type& t) { return std::ranges::count(words_of(t.names), *found) > 0; });
    require(type != std::end(types), Errc::config, v.where("distributed_type"), " ", hosts::quoted(*found),
            ": there are NO, MULTI_GPU, MULTI_CPU, DEEPSPEED and FSDP");
    require(type->instead.empty(), Errc::config, v.where("distributed_type"), ": ", *found, ": ",
            type->instead);
    return type->method;
  }
  if (v.first_of_block("deepspeed_config")) return Method::deepspeed;
  return v.first_of_block("fsdp_config") ? Method::fsdp : Method::data_parallel;
}

std::string configuration_of(const Values& v, Method method) {
  refuse_other_blocks(v, method);
  if (method == Method::deepspeed && v.has("deepspeed_config_file") &&
      v.text("deepspeed_config_file") != "none")
    return deepspeed_file(v);
  Json json = Json::object();
  if (method == Method::deepspeed)
    json = deepspeed_json(v);
  else if (method == Method::fsdp)
    json = fsdp_json(v);
  else if (v.has("gradient_accumulation_steps") || v.has("gradient_clipping") || precision_of(v) != "no")
    put_sizes(json, v);
  put_precision(json, v, method);
  put_mesh(json, v);
  return json.empty() ? "" : json.dump();
}

}  // namespace rz::accelerate
