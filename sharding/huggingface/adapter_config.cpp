#include "sharding/huggingface/adapter_config.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "autograd_lite/models/language_model.h"
#include "autograd_lite/nn/layers.h"
#include "comm/core/error.h"
#include "sharding/checkpoint/open_tensors.h"
#include "sharding/io/foreign_keys.h"
#include "sharding/io/json.h"
#include "sharding/io/text.h"

namespace rz {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

/// Keys that are read, and those that change no result once an adapter exists. Other ways to begin change the
/// frozen weights.
constexpr ForeignKeys adapter_keys[] = {
    {"peft_type target_modules r lora_alpha lora_dropout use_rslora modules_to_save fan_in_fan_out task_type "
     "base_model_name_or_path revision inference_mode auto_mapping peft_version megatron_core "
     "qalora_group_size eva_config runtime_config"},
    {"bias", Treatment::refused, "; biases stay frozen: use \"none\"", R"(["none"])"},
    {"init_lora_weights", Treatment::refused,
     "; it changes the frozen weights: save it with PEFT's path_initial_model_for_weight_conversion",
     R"([true, "gaussian", "eva", "orthogonal"])"}};

void check_keys(const JsonObject& o) {
  const auto refuse = [&](const std::string& key, std::string_view remedy) {
    fail(Errc::unsupported, o.file(), ": ", key, ": not supported in this build yet: ", to_display(o.at(key)),
         remedy);
  };
  if (o.text("peft_type", "LORA") != "LORA") refuse("peft_type", "; an adapter is LORA");
  for (const std::string& key : o.keys()) {
    const ForeignKeys* const row = find_keys(adapter_keys, key);
    if (!is_accepted(row, o.at(key))) refuse(key, row ? row->note : "");
  }
}

std::vector<std::string> names_at(const JsonObject& o, const char* key) {
  if (!o.has(key) || o.at(key).is_null()) return {};
  const json& list = o.at(key);
  if (!list.is_array() || !std::ranges::all_of(list, [](const json& v) { return v.is_string(); }))
    o.fail_at(key, concat("expected a list of names, found ", to_display(list)));
  return list.get<std::vector<std::string>>();
}

/// The file of a folder, or the file itself.
std::string file_of(const std::string& path, const char* name) {
  return fs::is_directory(path) ? (fs::path(path) / name).string() : path;
}

/// PEFT knows no patterns.
bool has_pattern(const std::vector<std::string>& names) {
  return std::ranges::any_of(names, [](const std::string& n) { return n.find_first_of("*{") != n.npos; });
}

template <class T>
std::set<std::string> names_of(const std::vector<std::pair<std::string, T*>>& named) {
  std::set<std::string> names;
  for (const auto& [name, x] : named) names.insert(name);
  return names;
}

/// Target modules as a list. PEFT saves those of "all-linear" so, too.
json targets_json(Module& module, const TargetModules& targets) {
  if (targets.names.empty() && targets.expression != "all-linear") return targets.expression;
  if (!targets.names.empty() && !has_pattern(targets.names)) return targets.names;
  return names_of(lora_layers(module));
}

json saved_json(Module& module, const std::vector<std::string>& patterns) {
  if (patterns.empty()) return nullptr;
  return has_pattern(patterns) ? json(names_of(saved_modules(module))) : json(patterns);
}

/// Whether the weights are [in, out]: PEFT has one value for all layers.
bool fan_in_fan_out(Module& module) {
  return std::ranges::any_of(lora_layers(module), [](const auto& named) {
    return named.second->layout == nn::WeightLayout::in_out;
  });
}

}  // namespace

AdapterConfig parse_adapter_config(const JsonObject& config) {
  check_keys(config);
  AdapterConfig all;
  LoraOptions& o = all.options;
  o.r = static_cast<std::size_t>(config.integer("r", static_cast<std::int64_t>(o.r), 1, 1 << 20));
  o.lora_alpha = config.number("lora_alpha", o.lora_alpha, 1e-30, 1e30);
  o.lora_dropout = config.number("lora_dropout", o.lora_dropout, 0, 0.999999);
  o.use_rslora = config.boolean("use_rslora", false);
  o.modules_to_save = names_at(config, "modules_to_save");
  if (config.has("target_modules") && config.at("target_modules").is_string())
    o.target_modules = config.text("target_modules", "");
  else
    o.target_modules = names_at(config, "target_modules");
  if (o.target_modules.empty())
    config.fail_at("target_modules", "missing; it names the layers of the adapter");
  all.fan_in_fan_out = config.boolean("fan_in_fan_out", false);
  return all;
}

AdapterConfig read_adapter(const std::string& path) {
  const std::string file = file_of(path, adapter_config_name);
  const json document = parse_json(read_text_file(file), file, JsonDialect::strict);
  return parse_adapter_config(JsonObject(document, file));
}

LoraOptions read_adapter_config(const std::string& path) { return read_adapter(path).options; }

std::string adapter_beside(const std::string& folder) {
  if (has_checkpoint(folder) || !fs::exists(fs::path(folder) / adapter_config_name)) return "";
  return concat(escaped(folder), ": has an adapter beside its weights (", adapter_config_name,
                "), which is not applied; --adapter ", escaped(folder), " applies it");
}

std::string adapter_weights(const std::string& path) {
  const fs::path own = file_of(path, adapter_weights_name), pickle = file_of(path, "adapter_model.bin");
  if (fs::exists(own) || !fs::is_directory(path)) return own.string();
  require(fs::exists(pickle), Errc::config, escaped(path), ": holds neither ", adapter_weights_name,
          " nor adapter_model.bin; give the folder of an adapter");
  return pickle.string();
}

void require_same_options(const LoraOptions& stored, const LoraOptions& own, const std::string& file) {
  const auto differs = [&](const char* key, const auto& a, const auto& b) {
    require(a == b, Errc::config, escaped(file), ": ", key, " is ", a, ", and of the model ", b,
            "; give add_lora() or ringzero.lora the options of the adapter");
  };
  differs("r", stored.r, own.r);
  differs("lora_alpha", stored.lora_alpha, own.lora_alpha);
  differs("use_rslora", stored.use_rslora, own.use_rslora);
}

std::string adapter_config_json(Module& module, const std::string& base) {
  const LoraOptions* o = lora_options(module);
  require(o != nullptr, Errc::invalid_argument, "the model has no LoRA; call add_lora() first");
  require(has_one_lora(module), Errc::unsupported,
          "parts of the model have LoRA with other options, and an adapter has one set; save each part");
  nlohmann::ordered_json config;
  config["peft_type"] = "LORA";
  const auto* model = dynamic_cast<const LanguageModel*>(&module);
  if (model) config["task_type"] = "CAUSAL_LM";
  const std::string& name = base.empty() && model ? model->origin().name : base;
  config["base_model_name_or_path"] = name.empty() ? json() : json(name);
  config["r"] = o->r;
  const auto whole = static_cast<std::int64_t>(o->lora_alpha);
  config["lora_alpha"] = static_cast<double>(whole) == o->lora_alpha ? json(whole) : json(o->lora_alpha);
  config["lora_dropout"] = o->lora_dropout;
  config["use_rslora"] = o->use_rslora;
  config["target_modules"] = targets_json(module, o->target_modules);
  config["modules_to_save"] = saved_json(module, o->modules_to_save);
  config["fan_in_fan_out"] = fan_in_fan_out(module);
  config["bias"] = "none";
  config["init_lora_weights"] = true;
  config["use_dora"] = false;
  config["inference_mode"] = true;
  return config.dump(2) + "\n";
}

}  // namespace rz
