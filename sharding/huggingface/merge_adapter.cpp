#include "sharding/huggingface/merge_adapter.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <regex>
#include <set>
#include <string_view>

#include "autograd_lite/models/lora.h"
#include "autograd_lite/nn/layers.h"
#include "comm/core/error.h"
#include "sharding/checkpoint/open_tensors.h"
#include "sharding/huggingface/adapter_config.h"
#include "sharding/huggingface/families.h"
#include "sharding/io/json.h"
#include "sharding/io/text.h"
#include "tensor/ops.h"

namespace rz {
namespace {

using nlohmann::json;

constexpr std::string_view a_ending = ".lora_A.weight", b_ending = ".lora_B.weight";

bool is_update(const TensorInfo& t) { return t.name.ends_with(a_ending) || t.name.ends_with(b_ending); }

std::string without(std::string_view ending, const std::string& name) {
  return name.substr(0, name.size() - ending.size());
}

/// "model.norm" of "model.norm.weight"
std::string module_of(const std::string& tensor) { return tensor.substr(0, tensor.rfind('.')); }

// ---- A and B

/// A and B of a layer.
struct StoredUpdate {
  std::vector<float> a, b;
  LowRankFactors factors;
};
using Update = std::shared_ptr<const StoredUpdate>;

std::vector<float> values_of(const TensorSource& source, const TensorInfo& t) {
  std::vector<float> values(t.count);
  source.read_f32(t, 0, values);
  return values;
}

/// The B of an A, whose shapes are of rank r.
const TensorInfo& required_b(const TensorSource& adapter, const TensorInfo& a, const LoraOptions& o) {
  const std::string layer = without(a_ending, a.name);
  const TensorInfo* b = adapter.find(concat(layer, b_ending));
  require(b != nullptr, Errc::config, escaped(adapter.path()), ": missing: ", escaped(layer), b_ending);
  const bool matrices =
      a.shape.size() == 2 && b->shape.size() == 2 && a.shape[0] == o.r && b->shape[1] == o.r;
  require(matrices, Errc::config, escaped(adapter.path()), ": ", escaped(a.name), " is ", name(a.shape),
          " and B ", name(b->shape), ", expected [r, in] and [out, r], where r is ", o.r);
  return *b;
}

/// The update whose A is a tensor of `adapter`. `in_out`: whether a square weight is [in, out].
Update read_update(const TensorSource& adapter, const TensorInfo& a, const TensorInfo& weight,
                   const LoraOptions& o, bool in_out) {
  const std::string layer = without(a_ending, a.name);
  const TensorInfo* const b = &required_b(adapter, a, o);
  const std::vector<std::uint64_t> out_in{b->shape[0], a.shape[1]}, turned{a.shape[1], b->shape[0]};
  require(weight.shape == out_in || weight.shape == turned, Errc::config, escaped(adapter.path()), ": ",
          escaped(layer), " is for a weight ", name(out_in), ", and that of the model is ",
          name(weight.shape));
  auto u = std::make_shared<StoredUpdate>(StoredUpdate{values_of(adapter, a), values_of(adapter, *b), {}});
  const double r = static_cast<double>(o.r);
  u->factors = {.in = a.shape[1],
                .out = b->shape[0],
                .r = o.r,
                .scale = static_cast<float>(o.lora_alpha / (o.use_rslora ? std::sqrt(r) : r)),
                .in_out = out_in == turned ? in_out : weight.shape == turned,
                .a = u->a,
                .b = u->b};
  return u;
}

/// Whether a square weight of a base is [in, out], as Conv1D of GPT-2 has it, by the nearest layers that are
/// not square and have a bias. Conv1D has one always.
bool is_in_out(const TensorSource& base, const TensorInfo& weight, bool fan_in_fan_out) {
  const auto bias_of = [&](const TensorInfo& t) { return base.find(concat(module_of(t.name), ".bias")); };
  if (!bias_of(weight)) return false;
  for (std::string above = module_of(weight.name); !above.empty();) {
    above.resize(above.find('.') == above.npos ? 0 : above.rfind('.'));
    for (const TensorInfo& t : base.tensors()) {
      const bool tells = t.name.starts_with(above) && t.name.ends_with(".weight") && t.shape.size() == 2 &&
                         t.shape[0] != t.shape[1];
      const TensorInfo* bias = tells ? bias_of(t) : nullptr;
      if (bias && bias->shape == std::vector{t.shape[1]}) return true;
      if (bias && bias->shape == std::vector{t.shape[0]}) return false;
    }
  }
  return fan_in_fan_out;
}

/// Reads a weight with its update, in f32 or bf16 or f16.
TensorSource::Read merged_read(const TensorSource& base, const TensorInfo& weight, const Update& update,
                               DType dtype) {
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
void add_merged(TensorSource& to, const TensorSource& base, const TensorInfo& weight, const Update& update,
                bool wide) {
  TensorInfo info = weight;
  const DType dtype = wide ? DType::f32 : dtype_in(weight);
  info.dtype = safetensors_name(dtype);
  info.bytes = info.count * size_of(dtype);
  to.add(info, merged_read(base, weight, update, dtype));
}

/// Adds a tensor of another source by a name.
void add_copy(TensorSource& to, const TensorSource& from, const TensorInfo& t, const std::string& name) {
  TensorInfo info = t;
  info.name = name;
  to.add(info, [from, &t](std::uint64_t begin, std::span<std::byte> out) { from.read_bytes(t, begin, out); });
}

// ---- names

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
  /// The name of the base's layer in the adapter.
  std::string own_name(std::string_view layer) const {
    if (!rule_) return std::string(layer);
    if (layer.starts_with(rule_->second)) layer.remove_prefix(rule_->second.size());
    return concat(rule_->first, layer);
  }

 private:
  static std::string describe(const std::pair<std::string, std::string>& rule) {
    return rule.second.empty() ? concat("without '", rule.first, "'") : concat("with '", rule.second, "'");
  }
  void require_one_rule(const TensorInfo& t, const std::string& own, const std::string& weight) {
    const std::size_t common = std::min(own.size(), weight.size());
    const std::pair rule(own.substr(0, own.size() - common), weight.substr(0, weight.size() - common));
    if (!rule_) rule_ = rule, first_ = t.name;
    require(rule == *rule_, Errc::config, escaped(adapter_.path()), ": ", escaped(t.name), " is in ",
            escaped(base_.path()), ' ', escaped(describe(rule)), ", and ", escaped(first_), ' ',
            escaped(describe(*rule_)), "; give the model that the adapter was made for");
  }

  const TensorSource &base_, &adapter_;
  std::map<const TensorInfo*, const TensorInfo*> by_weight_;
  std::optional<std::pair<std::string, std::string>> rule_;  // first parts that only the adapter or base has
  std::string first_;
};

/// A name with one '#' for each number: layers of a kind have one.
std::string kind_of(std::string_view name) {
  return std::regex_replace(std::string(name), std::regex("[0-9]+"), "#");
}

/// Which layers of a base must have an update; by the kinds of those that have one for "all-linear".
class Targets {
 public:
  Targets(const TargetModules& targets, const std::set<std::string>& updated) : targets_(targets) {
    if (targets.names.empty() && !targets.expression.empty() && targets.expression != "all-linear") try {
        expression_.emplace(targets.expression);
      } catch (const std::regex_error&) {  // of Python alone: nothing is required
      }
    if (targets.expression == "all-linear")
      for (const std::string& layer : updated) kinds_.insert(kind_of(layer));
  }
  /// Whether none is known: an expression that only Python has, or no options.
  bool are_unknown() const { return targets_.names.empty() && !expression_ && kinds_.empty(); }
  /// `layer`: its name in the adapter.
  bool contain(const std::string& layer) const {
    if (expression_) return std::regex_match(layer, *expression_);
    return kinds_.contains(kind_of(layer)) ||
           std::ranges::any_of(targets_.names,
                               [&](const std::string& target) { return matches_name(layer, target); });
  }

 private:
  const TargetModules& targets_;
  std::optional<std::regex> expression_;
  std::set<std::string> kinds_;
};

/// Whether PEFT has a copy of a tensor's module, or of one above it, beside the one of the model.
bool is_copied(const std::string& tensor, const LoraOptions& o) {
  for (auto dot = tensor.find('.'); dot != tensor.npos; dot = tensor.find('.', dot + 1))
    if (is_saved_module(tensor.substr(0, dot), o.modules_to_save)) return true;
  return false;
}

/// Every layer of target_modules must have its update, and every module of modules_to_save its weight.
void require_all_layers(const TensorSource& base, const TensorSource& adapter, const LoraOptions& o,
                        const ChangedWeights& changed, const std::set<std::string>& updated) {
  const Targets targets(o.target_modules, updated);
  for (const TensorInfo& t : base.tensors()) {
    if (!t.name.ends_with(".weight") || changed.has(t)) continue;
    const std::string layer = module_of(t.name);
    require(!is_copied(changed.own_name(t.name), o), Errc::config, escaped(adapter.path()),
            ": missing: ", escaped(t.name), " of ", escaped(base.path()), ", which modules_to_save names");
    require(t.shape.size() != 2 || !targets.contain(changed.own_name(layer)), Errc::config,
            escaped(adapter.path()), ": missing: A and B of ", escaped(layer), " of ", escaped(base.path()),
            ", which target_modules names");
  }
}

// ---- embeddings and heads

/// Names of the table of embeddings and of the head of a model that a family has.
struct TableAndHead {
  std::string table, head;
};

/// The table and the head of a family, if the tensor is one of them.
std::optional<TableAndHead> table_and_head(const TensorSource& base, const std::string& tensor) {
  for (const NameTable& names : name_tables()) {
    TableAndHead of{concat(names.prefix, names.table), std::string(names.head)};
    if ((tensor == of.table || tensor == of.head) && in_base(base, of.table)) return of;
  }
  return std::nullopt;
}

bool has_equal_values(const TensorSource& source, const TensorInfo& a, const TensorInfo& b) {
  return a.shape == b.shape && values_of(source, a) == values_of(source, b);
}

// ---- an adapter's file

/// The name in the model.
std::string own_name(const TensorInfo& t) {
  return t.name.substr(t.name.starts_with(adapter_prefix) ? adapter_prefix.size() : 0);
}

void require_finite(const TensorSource& adapter, const TensorInfo& t) {
  std::vector<float> values(std::min<std::uint64_t>(t.count, 1 << 20));
  for (std::uint64_t at = 0; is_float_dtype(t.dtype) && at < t.count; at += values.size()) {
    const std::span part = std::span(values).first(std::min<std::uint64_t>(values.size(), t.count - at));
    adapter.read_f32(t, at, part);
    const auto bad = std::ranges::find_if(part, [](float x) { return !std::isfinite(x); });
    require(bad == part.end(), Errc::config, escaped(adapter.path()), ": ", escaped(t.name), '[',
            at + static_cast<std::uint64_t>(bad - part.begin()), "] is ", bad == part.end() ? 0 : *bad,
            "; give an adapter from before its run diverged");
  }
}

/// That a tensor is A or B of a layer of target_modules, or one of the model.
void check_tensor(const TensorSource& adapter, const TensorInfo& t, const LoraOptions& o,
                  const Targets& targets) {
  const std::string own = own_name(t);
  if (t.name.ends_with(a_ending)) {
    required_b(adapter, t, o);
    const std::string layer = without(a_ending, own);
    require(targets.are_unknown() || targets.contain(layer), Errc::config, escaped(adapter.path()), ": ",
            escaped(t.name), " is of a layer that target_modules of ", adapter_config_name,
            " does not name, so that PEFT leaves it out; name the layer, or remove its A and B");
  } else if (t.name.ends_with(b_ending)) {
    require(adapter.find(concat(without(b_ending, t.name), a_ending)) != nullptr, Errc::config,
            escaped(adapter.path()), ": missing: ", escaped(without(b_ending, t.name)), a_ending);
  } else {
    constexpr const char* remedy = "; merge this adapter with merge_and_unload() of PEFT";
    require(own.find(".base_layer.") == own.npos, Errc::unsupported, escaped(adapter.path()), ": ",
            escaped(t.name),
            ": not supported in this build yet: the weight of a layer that has an update, as "
            "PEFT writes it if target_modules names a head or a table of embeddings",
            remedy);
    require(
        own.find(".lora_A.") == own.npos && own.find(".lora_B.") == own.npos, Errc::config,
        escaped(adapter.path()), ": ", escaped(t.name),
        ": no name of PEFT's files, which end in .lora_A.weight and .lora_B.weight, without the adapter's "
        "name; write the file with save_pretrained() of PEFT");
    require(own.find(".lora_") == own.npos, Errc::unsupported, escaped(adapter.path()), ": ", escaped(t.name),
            ": not supported in this build yet: an update is A and B of a linear layer", remedy);
    require(adapter.find(concat(module_of(t.name), a_ending)) == nullptr, Errc::config,
            escaped(adapter.path()), ": ", escaped(t.name),
            " is of a layer that has an update, which changes the model's own weight, so that PEFT does not "
            "read it; remove it from the file");
  }
}

/// An adapter whose tensors are sorted by what they do to a base.
class Merge {
 public:
  Merge(const TensorSource& base, const std::string& folder)
      : base_(base),
        config_(read_adapter(folder)),
        adapter_(open_adapter(folder, config_.options)),
        changed_(base_, adapter_) {
    for (const TensorInfo& t : adapter_.tensors()) {
      if (t.name.ends_with(a_ending))
        add_update(t);
      else if (!t.name.ends_with(b_ending))
        add_whole(t);
    }
    require_all_layers(base_, adapter_, config_.options, changed_, updated_);
  }

  MergedAdapter result(bool wide) const {
    MergedAdapter merged{TensorSource(base_.path()), untied_};
    for (const TensorInfo& t : base_.tensors()) {
      if (const auto u = updates_.find(&t); u != updates_.end())
        add_merged(merged.weights, base_, t, u->second, wide);
      else if (const auto r = replaced_.find(&t); r != replaced_.end())
        add_copy(merged.weights, adapter_, *r->second, t.name);
      else
        add_copy(merged.weights, base_, t, t.name);
    }
    if (new_head_.of) add_copy(merged.weights, *new_head_.of, *new_head_.tensor, new_head_.name);
    return merged;
  }

 private:
  void add_update(const TensorInfo& a) {
    const std::string layer = without(a_ending, own_name(a));
    const TensorInfo& weight = changed_.find(a, concat(layer, ".weight"));
    updates_[&weight] =
        read_update(adapter_, a, weight, config_.options, is_in_out(base_, weight, config_.fan_in_fan_out));
    updated_.insert(layer);
  }

  void add_whole(const TensorInfo& t) {
    const std::string own = own_name(t);
    const auto tied = table_and_head(base_, own);
    if (tied && own == tied->head && !in_base(base_, own)) return add_head(t, *tied);
    const TensorInfo& weight = changed_.find(t, own);
    require(t.shape == weight.shape, Errc::config, escaped(adapter_.path()), ": ", escaped(t.name), " is ",
            name(t.shape), ", and ", escaped(weight.name), " of ", escaped(base_.path()), " is ",
            name(weight.shape), "; give the model that the adapter was made for");
    replaced_[&weight] = &t;
    if (!is_copy(own)) return;
    if (tied) {
      untied_ = true;
      if (own == tied->table && !in_base(base_, tied->head) && !in_adapter(tied->head))
        new_head_ = {&base_, &weight, tied->head};
    } else {
      require(
          !is_unknown_table(own), Errc::config, escaped(adapter_.path()), ": ", escaped(t.name),
          " replaces the table of ", escaped(base_.path()),
          ", which may be its head as well, as it has none beside it; give a model with a head of its own");
    }
  }

  /// The head of a base whose table is its head.
  void add_head(const TensorInfo& t, const TableAndHead& names) {
    const TensorInfo& table = *in_base(base_, names.table);
    require(t.shape == table.shape, Errc::config, escaped(adapter_.path()), ": ", escaped(t.name), " is ",
            name(t.shape), ", and ", escaped(table.name), " of ", escaped(base_.path()), " is ",
            name(table.shape), "; give the model that the adapter was made for");
    const TensorInfo* own_table = in_adapter(names.table);
    if (is_copy(names.head) || (own_table && is_copy(names.table))) {
      untied_ = true, new_head_ = {&adapter_, &t, names.head};
      return;
    }
    require(own_table && has_equal_values(adapter_, t, *own_table), Errc::config, escaped(adapter_.path()),
            ": ", escaped(t.name), " is not the adapter's ", names.table, ", though ", escaped(base_.path()),
            " has one tensor for both; name its module in modules_to_save");
  }

  bool is_copy(const std::string& own) const { return is_copied(own, config_.options); }
  const TensorInfo* in_adapter(const std::string& own) const {
    const TensorInfo* t = adapter_.find(concat(adapter_prefix, own));
    return t ? t : adapter_.find(own);
  }
  /// A table in a model of no known family, with a head that is known to be the same tensor.
  bool is_unknown_table(const std::string& own) const {
    const auto is_head = [](const TensorInfo& t) {
      return t.name.ends_with("lm_head.weight") || t.name.ends_with("embed_out.weight");
    };
    const bool table = own.ends_with(".embed_tokens.weight") || own.ends_with(".wte.weight") ||
                       own.ends_with(".embed_in.weight");
    return table && std::ranges::none_of(base_.tensors(), is_head);
  }

  const TensorSource& base_;
  AdapterConfig config_;
  TensorSource adapter_;
  ChangedWeights changed_;
  std::map<const TensorInfo*, Update> updates_;
  std::map<const TensorInfo*, const TensorInfo*> replaced_;
  std::set<std::string> updated_;  // layers, by their names in the adapter
  struct {
    const TensorSource* of = nullptr;
    const TensorInfo* tensor = nullptr;
    std::string name{};
  } new_head_;
  bool untied_ = false;
};

}  // namespace

TensorSource open_adapter(const std::string& path, const LoraOptions& o, bool nonfinite) {
  TensorSource adapter = open_tensors(adapter_weights(path));
  std::set<std::string> updated;
  for (const TensorInfo& t : adapter.tensors())
    if (t.name.ends_with(a_ending)) updated.insert(without(a_ending, own_name(t)));
  const Targets targets(o.target_modules, updated);
  for (const TensorInfo& t : adapter.tensors()) {
    check_tensor(adapter, t, o, targets);
    if (!nonfinite) require_finite(adapter, t);
  }
  return adapter;
}

MergedAdapter merge_adapter(const TensorSource& base, const std::string& folder, bool wide) {
  return Merge(base, folder).result(wide);
}

// ---- checkpoints

namespace {

constexpr const char* state_key = "adapter";

bool has_updates(const TensorSource& source) {
  return source.state() && std::ranges::any_of(source.tensors(), is_update);
}

std::vector<std::string> texts_at(const JsonObject& o, const char* key) {
  std::vector<std::string> texts;
  for (const json& text : o.has(key) && o.at(key).is_array() ? o.at(key) : json::array())
    if (text.is_string()) texts.push_back(text.get<std::string>());
  return texts;
}

/// adapter_state() of a checkpoint.
struct StoredState {
  AdapterConfig adapter;
  std::string config;
  std::vector<std::string> whole;   ///< tensors beside A and B
  std::vector<std::string> in_out;  ///< layers whose weight is [in, out]
};

StoredState parse_adapter_state(const json& state, const std::string& file) {
  const JsonObject o(state, file, state_key);
  const JsonObject config = o.object("config");
  return {parse_adapter_config(config), o.at("config").dump(2) + "\n", texts_at(o, "whole"),
          texts_at(o, "in_out")};
}

std::optional<StoredState> stored_state(const TensorSource& checkpoint) {
  if (!checkpoint.state()) return std::nullopt;
  const json state = parse_json(*checkpoint.state(), checkpoint.path(), JsonDialect::strict);
  if (!state.is_object() || !state.contains(state_key)) return std::nullopt;
  return parse_adapter_state(state[state_key], checkpoint.path());
}

StoredState required_state(const TensorSource& checkpoint) {
  auto stored = stored_state(checkpoint);
  require(
      stored.has_value(), Errc::config, escaped(checkpoint.path()),
      ": has updates of LoRA and not their options, as earlier versions have saved it, and models whose "
      "parts have other ones; resume its run and save the model, which merges them (train_lm --save OUT), "
      "or the adapter (--save-adapter OUT)");
  return *stored;
}

/// Names of an adapter's tensors beside A and B.
std::vector<std::string> whole_tensors(Module& module) {
  std::vector<std::string> names;
  const AdapterTensors all = adapter_tensors(module);
  for (const auto& [name, p] : all.parameters)
    if (!name.ends_with(a_ending) && !name.ends_with(b_ending)) names.push_back(name);
  for (const auto& [name, b] : all.buffers) names.push_back(name);
  return names;
}

/// ", which are those of 'base'"
std::string frozen_weights(const TensorSource& checkpoint) {
  std::string names;
  const json state = parse_json(*checkpoint.state(), checkpoint.path(), JsonDialect::strict);
  for (const json& name : state.value("base", json::array()))
    if (name.is_string())
      names +=
          concat(names.empty() ? ", which are those of '" : " and '", escaped(name.get<std::string>()), '\'');
  return names;
}

}  // namespace

std::string adapter_state(Module& module) {
  if (!lora_options(module) || !has_one_lora(module)) return "";
  json state{{"config", json::parse(adapter_config_json(module))},
             {"whole", whole_tensors(module)},
             {"in_out", json::array()}};
  for (const auto& [name, layer] : lora_layers(module))
    if (layer->layout == nn::WeightLayout::in_out) state["in_out"].push_back(name);
  return state.dump();
}

void restore_adapter_state(Module& module, const std::string& text) {
  if (text.empty() || !lora_options(module)) return;
  const json state = json::parse(text);
  const std::vector<std::string> own = whole_tensors(module);
  std::vector<std::string> others = texts_at(JsonObject(state, state_key), "whole");
  std::erase_if(others, [&](const std::string& n) { return std::ranges::find(own, n) != own.end(); });
  save_with_adapter(module, others);
}

TensorSource merge_checkpoint(const TensorSource& run) {
  if (!has_updates(run)) return run;
  const StoredState stored = required_state(run);
  std::map<const TensorInfo*, Update> updates;
  for (const TensorInfo& t : run.tensors()) {
    if (!t.name.ends_with(a_ending)) continue;
    const std::string layer = without(a_ending, t.name);
    const TensorInfo* weight = run.find(concat(layer, ".weight"));
    require(weight != nullptr, Errc::config, escaped(run.path()), ": has no frozen weights",
            frozen_weights(run), "; write its adapter with `checkpoint adapter ", escaped(run.path()),
            " OUT`, and merge that into them, or give it beside them: --adapter OUT");
    const bool in_out = std::ranges::find(stored.in_out, layer) != stored.in_out.end();
    updates[weight] = read_update(run, t, *weight, stored.adapter.options, in_out);
  }
  TensorSource merged(run.path());
  merged.set_choice(run.choice());
  merged.set_state(*run.state());
  for (const TensorInfo& t : run.tensors()) {
    if (is_update(t)) continue;
    if (const auto u = updates.find(&t); u != updates.end())
      add_merged(merged, run, t, u->second, true);
    else
      add_copy(merged, run, t, t.name);
  }
  return merged;
}

StoredAdapter adapter_of_checkpoint(const TensorSource& run) {
  require(has_updates(run), Errc::config, escaped(run.path()),
          ": has no adapter: its run was not one with LoRA; `checkpoint merge` writes its model");
  const StoredState stored = required_state(run);
  StoredAdapter adapter{TensorSource(run.path()), stored.config};
  const auto add = [&](const TensorInfo& t) {
    add_copy(adapter.tensors, run, t, concat(adapter_prefix, t.name));
  };
  for (const TensorInfo& t : run.tensors())
    if (is_update(t)) add(t);
  for (const std::string& name : stored.whole) {
    const TensorInfo* t = run.find(name);
    require(t != nullptr, Errc::config, escaped(run.path()), ": missing: ", escaped(name),
            ", a tensor of its adapter");
    add(*t);
  }
  return adapter;
}

void require_no_adapter(const TensorSource& weights) {
  require(
      !has_updates(weights), Errc::config, escaped(weights.path()),
      ": has an adapter of its own, to which --adapter would be added; merge it before: checkpoint merge ",
      escaped(weights.path()), " OUT");
}

void require_no_adapter(const std::string& path) { require_no_adapter(open_tensors(path)); }

void require_no_peft_model(const TensorSource& weights) {
  const auto is_of_peft = [](const TensorInfo& t) {
    return t.name.find(adapter_prefix) != t.name.npos || t.name.find(".lora_A.default.") != t.name.npos;
  };
  const auto found = std::ranges::find_if(weights.tensors(), is_of_peft);
  require(weights.state() || found == weights.tensors().end(), Errc::config, escaped(weights.path()), ": ",
          found == weights.tensors().end() ? "" : escaped(found->name),
          " is of a model with an adapter of PEFT, whose options are not in the file; write the adapter with "
          "save_pretrained() of PEFT, and merge that: checkpoint merge BASE OUT --adapter ADAPTER");
}

void require_same_adapter(const TensorSource& checkpoint, Module& module) {
  if (!has_updates(checkpoint)) return;
  if (const auto stored = stored_state(checkpoint))
    require_same_options(stored->adapter.options, *lora_options(module), checkpoint.path());
}

}  // namespace rz
