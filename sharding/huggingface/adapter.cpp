#include "sharding/huggingface/adapter.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>

#include "autograd_lite/models/language_model.h"
#include "autograd_lite/nn/layers.h"
#include "comm/core/error.h"
#include "sharding/checkpoint/open_tensors.h"
#include "sharding/io/durable_file.h"
#include "sharding/io/json.h"
#include "sharding/io/text.h"
#include "sharding/parallel/rank_agreement.h"
#include "sharding/strategy/strategy.h"
#include "tensor/ops.h"

namespace rz {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* config_name = "adapter_config.json";
constexpr const char* weights_name = "adapter_model.safetensors";
/// PeftModel and LoraModel, which hold the model.
constexpr const char* prefix = "base_model.model.";

/// Keys that are read, and those that change no result once an adapter exists.
constexpr std::array known_keys{"peft_type",       "target_modules", "r",
                                "lora_alpha",      "lora_dropout",   "use_rslora",
                                "modules_to_save", "bias",           "init_lora_weights",
                                "fan_in_fan_out",  "task_type",      "base_model_name_or_path",
                                "revision",        "inference_mode", "auto_mapping",
                                "peft_version",    "megatron_core",  "qalora_group_size",
                                "eva_config",      "runtime_config"};

bool is_unset(const json& v) {
  return v.is_null() || v == false || ((v.is_object() || v.is_array()) && v.empty());
}

[[noreturn]] void refuse(const JsonObject& o, const std::string& key, const char* remedy) {
  fail(Errc::unsupported, o.file(), ": ", key, ": not supported in this build yet: ", to_display(o.at(key)),
       remedy);
}

/// Other ways to begin change the frozen weights.
void check_start(const JsonObject& o) {
  if (!o.has("init_lora_weights")) return;
  const json& start = o.at("init_lora_weights");
  const bool known = start.is_boolean() || start == "gaussian" || start == "eva" || start == "orthogonal";
  if (!known)
    refuse(o, "init_lora_weights",
           "; it changes the frozen weights: save it with PEFT's path_initial_model_for_weight_conversion");
}

void check_keys(const JsonObject& o) {
  const std::string type = o.text("peft_type", "LORA");
  if (type != "LORA") refuse(o, "peft_type", "; an adapter is LORA");
  if (o.has("bias") && o.at("bias") != "none") refuse(o, "bias", "; biases stay frozen: use \"none\"");
  check_start(o);
  for (const std::string& key : o.keys())
    if (std::ranges::find(known_keys, key) == known_keys.end() && !is_unset(o.at(key))) refuse(o, key, "");
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

/// Layers may be named otherwise: the tensors decide.
void require_same_options(const LoraOptions& stored, const LoraOptions& own, const std::string& file) {
  const auto differs = [&](const char* key, const auto& a, const auto& b) {
    require(a == b, Errc::config, escaped(file), ": ", key, " is ", a, ", and of the model ", b,
            "; give add_lora() or ringzero.lora the options of the adapter");
  };
  differs("r", stored.r, own.r);
  differs("lora_alpha", stored.lora_alpha, own.lora_alpha);
  differs("use_rslora", stored.use_rslora, own.use_rslora);
}

/// Whether two names are one, of which either may have more parts in front.
bool is_same_name(std::string_view a, std::string_view b) {
  return a == b || a.ends_with(concat('.', b)) || b.ends_with(concat('.', a));
}

/// LoadOptions::only would leave out what else the file has, which PEFT applies.
void require_no_other_tensors(const std::string& file, const std::vector<std::string>& known) {
  const TensorSource source = open_tensors(file);
  for (const TensorInfo& t : source.tensors()) {
    std::string_view own = t.name;
    if (own.find(".lora_") != own.npos) continue;  // PretrainedWeights compares those
    if (own.starts_with(prefix)) own.remove_prefix(std::string_view(prefix).size());
    require(
        std::ranges::any_of(known, [&](const std::string& name) { return is_same_name(own, name); }),
        Errc::config, escaped(file), ": ", escaped(t.name),
        " is neither of a layer with LoRA nor of modules_to_save, and would be left out; name its module in "
        "modules_to_save, or merge the adapter into its model: checkpoint merge BASE OUT --adapter DIR");
  }
}

/// What is read, checked before.
LoadOptions options_of(Module& module, const std::string& folder, LoadOptions options) {
  const LoraOptions* own = lora_options(module);
  require(own != nullptr, Errc::invalid_argument, escaped(folder),
          ": the model has no LoRA; call add_lora(model, read_adapter_config(FOLDER)) first");
  const std::string config = file_of(folder, config_name);
  if (fs::is_directory(folder)) require_same_options(read_adapter_config(config), *own, config);
  options.prefix = prefix;
  options.only.clear();
  for (const auto& [name, p] : adapter_parameters(module)) options.only.push_back(name);
  require_no_other_tensors(file_of(folder, weights_name), options.only);
  return options;
}

bool has_star(const std::vector<std::string>& patterns) {
  return std::ranges::any_of(patterns, [](const std::string& p) { return p.find('*') != p.npos; });
}

/// Target modules as a list. PEFT saves those of "all-linear" so, too, and knows no patterns.
json targets_json(Module& module, const TargetModules& targets) {
  if (targets.names.empty() && targets.expression != "all-linear") return targets.expression;
  if (!targets.names.empty() && !has_star(targets.names)) return targets.names;
  std::set<std::string> names;
  for (const auto& [name, layer] : lora_layers(module)) names.insert(name);
  return names;
}

json saved_json(Module& module, const std::vector<std::string>& patterns) {
  if (patterns.empty()) return nullptr;
  if (!has_star(patterns)) return patterns;
  const std::size_t begin = module.path().empty() ? 0 : module.path().size() + 1;
  std::set<std::string> names;
  for (const Module* m : module.modules())
    for (const std::string& pattern : patterns)
      if (m != &module && matches_name(m->path().substr(begin), pattern))
        names.insert(m->path().substr(begin));
  return names;
}

/// Whether the weights are [in, out]: PEFT has one value for all layers.
bool fan_in_fan_out(Module& module) {
  return std::ranges::any_of(lora_layers(module), [](const auto& named) {
    return named.second->layout == nn::WeightLayout::in_out;
  });
}

}  // namespace

namespace {

constexpr std::string_view a_ending = ".lora_A.weight", b_ending = ".lora_B.weight";

/// The tensor of a name that may have more parts in front, or fewer, in the base; nullptr if there is none,
/// or several.
const TensorInfo* in_base(const TensorSource& base, std::string_view name) {
  for (std::string_view rest = name;; rest.remove_prefix(rest.find('.') + 1)) {
    if (const TensorInfo* t = base.find(rest)) return t;
    if (std::ranges::count(rest, '.') < 2) break;
  }
  const auto ends = [&](const TensorInfo& t) { return t.name.ends_with(concat('.', name)); };
  const auto found = std::ranges::find_if(base.tensors(), ends);
  return std::ranges::count_if(base.tensors(), ends) == 1 ? &*found : nullptr;
}

/// The tensors of a base that an adapter changes, each by one tensor of its file, and all by one rule for
/// names.
class ChangedWeights {
 public:
  ChangedWeights(const TensorSource& base, const TensorSource& adapter) : base_(base), adapter_(adapter) {}

  /// The tensor `own` of the base, which `t` changes.
  const TensorInfo& find(const TensorInfo& t, const std::string& own) {
    const TensorInfo* const weight = in_base(base_, own);
    require(weight != nullptr, Errc::config, escaped(adapter_.path()), ": ", escaped(t.name), ": ",
            escaped(base_.path()), " has no tensor ", escaped(own), ", or several that end so",
            "; give the model that the adapter was made for");
    const auto [before, is_first] = by_weight_.emplace(weight, &t);
    require(is_first, Errc::config, escaped(adapter_.path()), ": ", escaped(before->second->name), " and ",
            escaped(t.name), " both change ", escaped(weight->name), " of ", escaped(base_.path()));
    if (std::ranges::count(own, '.') > 1)
      require_one_rule(t, own, weight->name);  // a head has no part in front
    return *weight;
  }
  bool has(const TensorInfo& weight) const { return by_weight_.contains(&weight); }

 private:
  void require_one_rule(const TensorInfo& t, const std::string& own, const std::string& weight) {
    const std::string rule = own.size() >= weight.size()
                                 ? concat("without '", own.substr(0, own.size() - weight.size()), "'")
                                 : concat("with '", weight.substr(0, weight.size() - own.size()), "'");
    if (rule_.empty()) rule_ = rule, first_ = t.name;
    require(rule == rule_, Errc::config, escaped(adapter_.path()), ": ", escaped(t.name), " is in ",
            escaped(base_.path()), ' ', escaped(rule), ", and ", escaped(first_), ' ', escaped(rule_),
            "; give the model that the adapter was made for");
  }

  const TensorSource& base_;
  const TensorSource& adapter_;
  std::map<const TensorInfo*, const TensorInfo*> by_weight_;
  std::string rule_, first_;
};

/// A table without a head beside it is the head's, too, which would change with it.
bool is_tied_table(const TensorSource& base, std::string_view name) {
  const auto is_table = [](std::string_view n) {
    return n.ends_with("embed_tokens.weight") || n.ends_with("wte.weight") || n.ends_with("embed_in.weight");
  };
  const auto is_head = [](const TensorInfo& t) {
    return t.name.ends_with("lm_head.weight") || t.name.ends_with("embed_out.weight");
  };
  return is_table(name) && std::ranges::none_of(base.tensors(), is_head);
}

/// Every layer that a list of target_modules names must have its update.
void require_all_layers(const TensorSource& base, const TensorSource& adapter, const LoraOptions& o,
                        const ChangedWeights& changed) {
  for (const TensorInfo& t : base.tensors()) {
    if (t.shape.size() != 2 || !t.name.ends_with(".weight") || changed.has(t)) continue;
    const std::string_view layer = std::string_view(t.name).substr(0, t.name.rfind('.'));
    for (const std::string& target : o.target_modules.names)
      require(!is_same_name(layer, target), Errc::config, escaped(adapter.path()), ": missing: A and B of ",
              escaped(layer), " of ", escaped(base.path()), ", which target_modules names");
  }
}

std::vector<float> values_of(const TensorSource& source, const TensorInfo& t) {
  std::vector<float> values(t.count);
  source.read_f32(t, 0, values);
  return values;
}

/// A and B of a layer.
struct StoredUpdate {
  std::vector<float> a, b;
  LowRankFactors factors;
};

StoredUpdate read_update(const TensorSource& adapter, const TensorInfo& a, const TensorInfo& weight,
                         const LoraOptions& o, bool fan_in_fan_out) {
  const std::string layer = a.name.substr(0, a.name.size() - a_ending.size());
  const TensorInfo* b = adapter.find(concat(layer, b_ending));
  require(b != nullptr, Errc::config, escaped(adapter.path()), ": missing: ", escaped(layer), b_ending);
  const bool matrices =
      a.shape.size() == 2 && b->shape.size() == 2 && a.shape[0] == o.r && b->shape[1] == o.r;
  require(matrices, Errc::config, escaped(adapter.path()), ": ", escaped(a.name), " is ", name(a.shape),
          " and B ", name(b->shape), ", expected [r, in] and [out, r], where r is ", o.r);
  const std::vector<std::uint64_t> out_in{b->shape[0], a.shape[1]}, in_out{a.shape[1], b->shape[0]};
  require(weight.shape == out_in || weight.shape == in_out, Errc::config, escaped(adapter.path()), ": ",
          escaped(layer), " is for a weight ", name(out_in), ", and that of the model is ",
          name(weight.shape));
  StoredUpdate u{values_of(adapter, a), values_of(adapter, *b), {}};
  const double r = static_cast<double>(o.r);
  u.factors = {.in = a.shape[1],
               .out = b->shape[0],
               .r = o.r,
               .scale = static_cast<float>(o.lora_alpha / (o.use_rslora ? std::sqrt(r) : r)),
               .in_out = out_in == in_out ? fan_in_fan_out : weight.shape == in_out,
               .a = u.a,
               .b = u.b};
  return u;
}

/// Reads a weight with its update, in f32 or bf16 or f16.
TensorSource::Read merged_read(const TensorSource& base, const TensorInfo& weight,
                               const std::shared_ptr<const StoredUpdate>& update, DType dtype) {
  return [base, &weight, update, dtype](std::uint64_t begin, std::span<std::byte> out) {
    const std::uint64_t first = begin / size_of(dtype), count = out.size() / size_of(dtype);
    const Tensor wide = Tensor::empty({count});
    const std::span<float> values(wide.data<float>(), count);
    base.read_f32(weight, first, values);
    merge_lora(update->factors, first, values);
    const Tensor narrow = dtype == DType::f32 ? wide : Tensor::empty({count}, dtype);
    if (dtype != DType::f32) ops::copy(narrow, wide, {});
    std::copy_n(narrow.raw(), out.size(), out.data());
  };
}

DType dtype_in(const TensorInfo& t) {
  return t.dtype == "BF16" ? DType::bf16 : t.dtype == "F16" ? DType::f16 : DType::f32;
}

/// Adds a tensor of the base with the update.
void add_merged(TensorSource& to, const TensorSource& base, const TensorInfo& weight,
                const std::shared_ptr<const StoredUpdate>& update, bool wide) {
  TensorInfo info = weight;
  const DType dtype = wide ? DType::f32 : dtype_in(weight);
  info.dtype = safetensors_name(dtype);
  info.bytes = info.count * size_of(dtype);
  to.add(info, merged_read(base, weight, update, dtype));
}

}  // namespace

TensorSource merge_adapter(const TensorSource& base, const std::string& folder, bool wide) {
  const LoraOptions options = read_adapter_config(folder);
  const std::string config = file_of(folder, config_name);
  const json document = parse_json(read_text_file(config), config, JsonDialect::strict);
  const bool fan_in_fan_out = JsonObject(document, config).boolean("fan_in_fan_out", false);
  const TensorSource adapter = open_tensors(file_of(folder, weights_name));
  ChangedWeights changed(base, adapter);
  std::map<const TensorInfo*, std::shared_ptr<const StoredUpdate>> updates;
  std::map<const TensorInfo*, const TensorInfo*> replaced;
  for (const TensorInfo& t : adapter.tensors()) {
    if (t.name.ends_with(b_ending)) continue;
    const bool is_a = t.name.ends_with(a_ending);
    std::string own = t.name.starts_with(prefix) ? t.name.substr(std::string_view(prefix).size()) : t.name;
    if (is_a) own.replace(own.size() - a_ending.size(), a_ending.size(), ".weight");
    const TensorInfo& weight = changed.find(t, own);
    if (!is_a) {
      require(t.shape == weight.shape, Errc::config, escaped(adapter.path()), ": ", escaped(t.name), " is ",
              name(t.shape), ", and ", escaped(weight.name), " of ", escaped(base.path()), " is ",
              name(weight.shape), "; give the model that the adapter was made for");
      require(
          !is_tied_table(base, weight.name), Errc::config, escaped(adapter.path()), ": ", escaped(t.name),
          " replaces the table of ", escaped(base.path()),
          ", which may be its head as well, as it has none beside it; give a model with a head of its own");
      replaced[&weight] = &t;
      continue;
    }
    auto update = std::make_shared<StoredUpdate>(read_update(adapter, t, weight, options, fan_in_fan_out));
    update->factors.a = update->a, update->factors.b = update->b;
    updates[&weight] = std::move(update);
  }
  require_all_layers(base, adapter, options, changed);
  TensorSource merged(base.path());
  for (const TensorInfo& t : base.tensors()) {
    if (const auto u = updates.find(&t); u != updates.end()) {
      add_merged(merged, base, t, u->second, wide);
    } else if (const auto r = replaced.find(&t); r != replaced.end()) {
      TensorInfo info = *r->second;
      info.name = t.name;
      merged.add(info, [adapter, from = r->second](std::uint64_t begin, std::span<std::byte> out) {
        adapter.read_bytes(*from, begin, out);
      });
    } else {
      merged.add(
          t, [base, &t](std::uint64_t begin, std::span<std::byte> out) { base.read_bytes(t, begin, out); });
    }
  }
  return merged;
}

LoraOptions read_adapter_config(const std::string& path) {
  const std::string file = file_of(path, config_name);
  const json document = parse_json(read_text_file(file), file, JsonDialect::strict);
  const JsonObject config(document, file);
  check_keys(config);
  LoraOptions o;
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
  return o;
}

PretrainedWeights load_adapter(Strategy& strategy, Module& module, const std::string& folder,
                               const LoadOptions& options, const Stream& stream) {
  return load_pretrained(strategy, module, file_of(folder, weights_name), options_of(module, folder, options),
                         stream);
}

PretrainedWeights load_adapter(Module& module, const std::string& folder, const LoadOptions& options,
                               const Stream& stream) {
  return load_pretrained(module, file_of(folder, weights_name), options_of(module, folder, options), stream);
}

std::string adapter_config_json(Module& module, const std::string& base) {
  const LoraOptions* o = lora_options(module);
  require(o != nullptr, Errc::invalid_argument, "the model has no LoRA; call add_lora() first");
  nlohmann::ordered_json config;
  config["peft_type"] = "LORA";
  const auto* model = dynamic_cast<const LanguageModel*>(&module);
  if (model) config["task_type"] = "CAUSAL_LM";
  const std::string& folder = base.empty() && model ? model->origin().folder : base;
  config["base_model_name_or_path"] = folder.empty() ? json() : json(folder);
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

void save_adapter(const std::string& folder, Module& module, Strategy& strategy, int rank,
                  const Stream& stream, const SaveAdapterOptions& options) {
  const std::string config = adapter_config_json(module, options.base_model_name_or_path);
  check_on_all_ranks(strategy.communicator(), [&] {
    if (rank == 0) make_folders(folder);
  });
  auto parameters = adapter_parameters(module);
  for (auto& [name, p] : parameters) name = concat(prefix, name);
  save_parameters((fs::path(folder) / weights_name).string(), parameters, strategy, rank, stream,
                  {.nonfinite = options.nonfinite});
  check_on_all_ranks(strategy.communicator(), [&] {
    if (rank == 0) write_durably((fs::path(folder) / config_name).string(), config);
  });
}

}  // namespace rz
