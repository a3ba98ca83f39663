#include "autograd_lite/models/lora.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <regex>
#include <set>

#include "autograd_lite/models/language_model.h"
#include "autograd_lite/nn/layers.h"
#include "comm/core/error.h"

namespace rz {
namespace {

using NamedModules = std::vector<std::pair<std::string, Module*>>;

/// All below a module, with their names from it.
NamedModules named_modules(Module& module) {
  const std::size_t prefix = module.path().empty() ? 0 : module.path().size() + 1;
  NamedModules all;
  for (Module* m : module.modules())
    if (m != &module) all.emplace_back(m->path().substr(prefix), m);
  return all;
}

std::string last_part(std::string_view name) { return std::string(name.substr(name.rfind('.') + 1)); }

/// "q_proj, k_proj and v_proj"
std::string layer_names(const NamedModules& modules) {
  std::vector<std::string> names;
  for (const auto& [name, m] : modules)
    if (dynamic_cast<nn::Linear*>(m) && std::ranges::find(names, last_part(name)) == names.end())
      names.push_back(last_part(name));
  std::string text;
  for (const std::string& name : names) text += concat(text.empty() ? "" : ", ", name);
  return text.empty() ? "there are none" : text;
}

/// The layers of logits.
std::set<const Module*> heads(Module& module) {
  std::set<const Module*> all;
  for (Module* m : module.modules())
    if (const auto* model = dynamic_cast<const LanguageModel*>(m))
      if (const Module* head = model->lm_head()) all.insert(head);
  return all;
}

/// With the targets of the family if there are none.
LoraOptions with_targets(const Module& module, LoraOptions o) {
  const auto* model = dynamic_cast<const LanguageModel*>(&module);
  if (o.target_modules.empty() && model) o.target_modules = model->origin().target_modules;
  return o;
}

void check_values(const LoraOptions& o) {
  require(!o.target_modules.empty(), Errc::invalid_argument,
          "target_modules: missing; name the layers, such as [\"q_proj\", \"v_proj\"], or \"all-linear\"");
  require(o.r >= 1, Errc::invalid_argument, "r: is 0, expected at least 1");
  require(o.lora_alpha > 0 && std::isfinite(o.lora_alpha), Errc::invalid_argument, "lora_alpha: is ",
          o.lora_alpha, ", expected more than 0");
  require(o.lora_dropout >= 0 && o.lora_dropout < 1, Errc::invalid_argument, "lora_dropout: is ",
          o.lora_dropout, ", expected 0 <= lora_dropout < 1");
}

/// "'q_prj' matches no module; did you mean 'q_proj'?"
[[noreturn]] void fail_unmatched(const char* key, const std::string& pattern, const NamedModules& modules) {
  std::vector<std::string> names;
  for (const auto& [name, m] : modules) {
    names.push_back(last_part(name));
    names.push_back(name);
  }
  const std::string near = nearest_name(pattern, names);
  fail(Errc::invalid_argument, key, ": '", pattern, "' matches no module",
       near.empty() ? "" : concat("; did you mean '", near, "'?"), near.empty() ? "; " : " ",
       "Linear layers are ", layer_names(modules));
}

/// Modules that any of the names matches. Each must match one.
NamedModules matched(const char* key, const std::vector<std::string>& patterns, const NamedModules& modules,
                     bool (*matches)(std::string_view name, std::string_view pattern) = matches_name) {
  NamedModules all;
  for (const std::string& pattern : patterns) {
    bool found = false;
    for (const auto& named : modules) {
      if (!matches(named.first, pattern)) continue;
      found = true;
      if (std::ranges::find(all, named) == all.end()) all.push_back(named);
    }
    if (!found) fail_unmatched(key, pattern, modules);
  }
  return all;
}

/// modules_to_save in PEFT: any ending of a name, not only one of whole parts.
bool matches_ending(std::string_view name, std::string_view pattern) {
  return (!pattern.empty() && name.ends_with(pattern)) || matches_name(name, pattern);
}

/// "(?<!" of an expression that only Python has; empty if there is none.
std::string part_of_python(const std::string& expression) {
  for (auto at = expression.find("(?"); at != expression.npos; at = expression.find("(?", at + 1))
    if (at + 2 < expression.size() &&
        std::string_view(":=!").find(expression[at + 2]) == std::string_view::npos)
      return expression.substr(at, expression.compare(at, 3, "(?<") == 0 ? 4 : 3);
  return "";
}

NamedModules matched(const std::string& expression, const NamedModules& modules) {
  NamedModules all;
  try {
    const std::regex regex(expression);
    for (const auto& named : modules)
      if (std::regex_match(named.first, regex)) all.push_back(named);
  } catch (const std::regex_error& e) {
    const std::string part = part_of_python(expression);
    fail(Errc::invalid_argument, "target_modules: '", expression, "' ",
         part.empty() ? concat("is no regular expression: ", e.what())
                      : concat("has '", part, "', which regular expressions of Python have, and those here (",
                               "ECMAScript) have not; give a list of names"));
  }
  const auto is_end = [&](const auto& named) { return matches_name(named.first, expression); };
  require(!all.empty() || std::ranges::none_of(modules, is_end), Errc::invalid_argument, "target_modules: '",
          expression, "' is a regular expression of whole names, and matches none; give the list [\"",
          expression, "\"] for the layers whose names end so, or '.*", expression, "'");
  if (all.empty()) fail_unmatched("target_modules", expression, modules);
  return all;
}

NamedModules all_linear(const NamedModules& modules) {
  NamedModules all;
  for (const auto& named : modules)
    if (dynamic_cast<nn::Linear*>(named.second)) all.push_back(named);
  require(!all.empty(), Errc::invalid_argument, "target_modules: all-linear: the model has no Linear layers");
  return all;
}

/// The layers that get an update. Those of modules_to_save are trained whole instead.
std::vector<nn::Linear*> targets(Module& module, const TargetModules& of, const NamedModules& saved) {
  const NamedModules modules = named_modules(module);
  const std::set<const Module*> logits = heads(module);
  const NamedModules found = of.expression == "all-linear" ? all_linear(modules)
                             : of.names.empty()            ? matched(of.expression, modules)
                                                           : matched("target_modules", of.names, modules);
  std::vector<nn::Linear*> layers;
  for (const auto& [name, m] : found) {
    const auto is_above = [m = m](const auto& whole) {
      const auto below = whole.second->modules();
      return std::ranges::find(below, m) != below.end();
    };
    if (std::ranges::any_of(saved, is_above)) continue;
    require(!logits.contains(m), Errc::invalid_argument, "target_modules: ", name,
            " is the head, which has no low-rank update here; add it to modules_to_save to train it whole");
    auto* const layer = dynamic_cast<nn::Linear*>(m);
    require(layer != nullptr, Errc::invalid_argument, "target_modules: ", name,
            " is no Linear layer; name those, which are ", layer_names(modules));
    require(!layer->weight.part, Errc::invalid_argument, "target_modules: ", name,
            " is divided over ranks; call add_lora() before parallelize()");
    layers.push_back(layer);
  }
  require(!layers.empty(), Errc::invalid_argument, "target_modules: all that match are in modules_to_save");
  return layers;
}

/// PEFT trains a copy of a tied weight, which only one of its users has.
void require_untied(Module& module, const std::string& name, const Parameter* p) {
  std::string scopes;
  int uses = 0;
  for (const Scope* s : module.scopes())
    if (std::ranges::find(s->parameters, p) != s->parameters.end())
      scopes += concat(uses++ ? " and " : "", s->name);
  require(uses <= 1, Errc::invalid_argument, "modules_to_save: ", name, ": ", p->name,
          " is tied: it is used in ", scopes,
          "; untie it, leave it out, or merge an adapter that has it: checkpoint merge BASE OUT --adapter "
          "ADAPTER");
}

void add_update(nn::Linear& layer, const std::shared_ptr<const LoraOptions>& options) {
  layer.lora = std::make_unique<nn::LowRankUpdate>(layer);
  nn::LowRankUpdate& update = *layer.lora;
  const double r = static_cast<double>(options->r);
  update.scale = static_cast<float>(options->lora_alpha / (options->use_rslora ? std::sqrt(r) : r));
  update.dropout = static_cast<float>(options->lora_dropout);
  update.options = options;
  const std::size_t in = layer.in_features();
  // kaiming_uniform_(a = sqrt(5)) of torch.
  layer.register_parameter(update.a, "lora_A.weight", {options->r, in},
                           {Initial::uniform, static_cast<float>(1 / std::sqrt(static_cast<double>(in)))});
  layer.register_parameter(update.b, "lora_B.weight", {layer.out_features(), options->r},
                           {Initial::constant, 0});
}

}  // namespace

void add_lora(Module& module, const LoraOptions& given) {
  const LoraOptions o = with_targets(module, given);
  check_values(o);
  if (const LoraOptions* before = lora_options(module)) {
    LoraOptions same = o;
    if (same.tensors_to_save.empty()) same.tensors_to_save = before->tensors_to_save;
    require(*before == same, Errc::invalid_argument,
            "the module has LoRA with other options; give it one set of options");
    return;
  }
  const NamedModules saved =
      matched("modules_to_save", o.modules_to_save, named_modules(module), matches_ending);
  for (const auto& [name, m] : saved)
    for (const Parameter* p : m->parameters()) require_untied(module, name, p);
  const std::vector<nn::Linear*> layers = targets(module, o.target_modules, saved);
  module.requires_grad_(false);
  for (const auto& [name, m] : saved) m->requires_grad_(true);
  const auto options = std::make_shared<const LoraOptions>(o);
  for (nn::Linear* layer : layers) add_update(*layer, options);
}

std::vector<std::pair<std::string, nn::Linear*>> lora_layers(Module& module) {
  std::vector<std::pair<std::string, nn::Linear*>> all;
  for (const auto& [name, m] : named_modules(module))
    if (auto* const layer = dynamic_cast<nn::Linear*>(m); layer && layer->lora) all.emplace_back(name, layer);
  return all;
}

const LoraOptions* lora_options(Module& module) {
  for (Module* m : module.modules())
    if (auto* const layer = dynamic_cast<nn::Linear*>(m); layer && layer->lora)
      return layer->lora->options.get();
  return nullptr;
}

bool has_one_lora(Module& module) {
  const LoraOptions* first = lora_options(module);
  return std::ranges::all_of(lora_layers(module), [&](const auto& named) {
    return named.second->lora->options && *named.second->lora->options == *first;
  });
}

bool is_saved_module(std::string_view name, const std::vector<std::string>& modules_to_save) {
  return std::ranges::any_of(modules_to_save, [&](const std::string& p) { return matches_ending(name, p); });
}

std::vector<std::pair<std::string, Module*>> saved_modules(Module& module) {
  const LoraOptions* options = lora_options(module);
  NamedModules all = named_modules(module);
  std::erase_if(all, [&](const auto& named) {
    return !options || !is_saved_module(named.first, options->modules_to_save);
  });
  return all;
}

AdapterTensors adapter_tensors(Module& module) {
  AdapterTensors all;
  const LoraOptions* options = lora_options(module);
  if (!options) return all;
  std::set<const void*> own;
  for (const auto& [name, layer] : lora_layers(module)) own.insert({&layer->lora->a, &layer->lora->b});
  for (const auto& [name, m] : saved_modules(module)) {
    for (const Parameter* p : m->parameters()) own.insert(p);
    for (const ModuleBuffer* b : m->buffers()) own.insert(b);
  }
  const auto is_own = [&](const auto& named) {
    return own.contains(named.second) ||
           std::ranges::find(options->tensors_to_save, named.first) != options->tensors_to_save.end();
  };
  for (const auto& named : module.named_parameters())
    if (is_own(named)) all.parameters.push_back(named);
  for (const auto& named : persistent_buffers(module))
    if (is_own(named) && named.second->shape.count() > 0) all.buffers.push_back(named);
  return all;
}

void save_with_adapter(Module& module, const std::vector<std::string>& names) {
  std::map<const LoraOptions*, std::shared_ptr<const LoraOptions>> changed;  // parts may have their own
  for (const auto& [layer_name, layer] : lora_layers(module)) {
    auto& options = changed[layer->lora->options.get()];
    if (!options) {
      LoraOptions now = *layer->lora->options;
      for (const std::string& name : names)
        if (std::ranges::find(now.tensors_to_save, name) == now.tensors_to_save.end())
          now.tensors_to_save.push_back(name);
      options = std::make_shared<const LoraOptions>(std::move(now));
    }
    layer->lora->options = options;
  }
}

std::string describe_lora(Module& module) {
  const LoraOptions* options = lora_options(module);
  if (!options) return "";
  std::size_t trained = 0, all = 0;
  for (const Parameter* p : module.parameters())
    all += p->count(), trained += p->requires_grad ? p->count() : 0;
  return concat("LoRA r ", options->r, ", lora_alpha ", options->lora_alpha, ", ", lora_layers(module).size(),
                " layers: ", trained, " of ", all, " elements are trained (",
                fixed(100 * static_cast<double>(trained) / static_cast<double>(all), 2), " %)");
}

void merge_lora(const LowRankFactors& f, std::size_t begin, std::span<float> weight) {
  const std::size_t columns = f.in_out ? f.out : f.in;
  std::vector<double> sums(columns);
  for (std::size_t at = 0, n; at < weight.size(); at += n) {
    const std::size_t row = (begin + at) / columns, column = (begin + at) % columns;
    n = std::min(columns - column, weight.size() - at);
    std::ranges::fill(sums, 0);
    for (std::size_t k = 0; k < f.r; ++k)
      for (std::size_t j = 0; j < n; ++j) {
        const std::size_t o = f.in_out ? column + j : row, i = f.in_out ? row : column + j;
        const double factor = double{f.scale} * double{f.b[o * f.r + k]};
        sums[j] += factor * double{f.a[k * f.in + i]};
      }
    for (std::size_t j = 0; j < n; ++j) weight[at + j] = static_cast<float>(double{weight[at + j]} + sums[j]);
  }
}

}  // namespace rz
