#pragma once
/// LoRA (Hu et al., arXiv:2106.09685) with the names of PEFT: a frozen model whose linear layers have
/// trainable low-rank updates.
///
///     auto model = rz::language_model_from_config("FOLDER");
///     rz::add_lora(*model, {.target_modules = {"q_proj", "v_proj"}, .r = 8, .lora_alpha = 16});
///
/// Strategies keep neither masters nor optimizer states of frozen parameters. sharding/huggingface/adapter.h
/// saves, loads and merges adapters; the section "ringzero.lora" of a configuration adds them.

#include <cstddef>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace rz {

class Module;
struct ModuleBuffer;
struct Parameter;
namespace nn {
struct Linear;
}

/// Names of layers, each matched by matches_name() (autograd_lite/nn/module.h); or an expression:
/// "all-linear", or a regular expression (ECMAScript) of the whole name from the module, such as
/// ".*\\.(q|v)_proj".
struct TargetModules {
  TargetModules() = default;
  TargetModules(std::initializer_list<std::string> list) : names(list) {}
  TargetModules(std::vector<std::string> list) : names(std::move(list)) {}
  TargetModules(std::string text) : expression(std::move(text)) {}
  TargetModules(const char* text) : expression(text) {}

  std::vector<std::string> names;
  std::string expression;  ///< if there are no names

  bool empty() const { return names.empty() && expression.empty(); }
  bool operator==(const TargetModules&) const = default;
};

/// As PEFT's LoraConfig. The update of a layer is multiplied by lora_alpha / r, or by lora_alpha / sqrt(r)
/// with use_rslora.
struct LoraOptions {
  TargetModules target_modules{};  ///< empty: those of PEFT for the family of a language_model_from_config()
  std::size_t r = 8;
  double lora_alpha = 8;
  double lora_dropout = 0;  ///< of the input of A, in training only
  bool use_rslora = false;
  /// Modules that are trained whole, and saved with the adapter, their buffers too: those whose names end in
  /// one of these texts, as in PEFT ("norm" is an ending of "input_layernorm"), or which matches_name() one.
  std::vector<std::string> modules_to_save{};
  /// Other parameters and buffers that the adapter has, by their names: they are saved with it, and not
  /// trained. load_adapter() adds what its file has, as by PEFT's save_embedding_layers.
  std::vector<std::string> tensors_to_save{};

  bool operator==(const LoraOptions&) const = default;
};

/// Freezes the module and adds the updates, whose parameters have no memory yet: call it before strategies
/// are made. "all-linear" leaves out the head of a LanguageModel. Errc::invalid_argument, "target_modules:
/// …", if a name matches nothing, or what is no nn::Linear, or the head of a LanguageModel; for values out of
/// range, and if the module has updates. The options that it already has change nothing. Strategies compare
/// options and factors over the ranks.
void add_lora(Module&, const LoraOptions&);

/// The options of add_lora(), of the first part that has some; null without.
const LoraOptions* lora_options(Module&);
/// Whether no part has other ones.
bool has_one_lora(Module&);
/// Layers with an update, with their names from the module.
std::vector<std::pair<std::string, nn::Linear*>> lora_layers(Module&);
/// Modules of LoraOptions::modules_to_save, with their names from the module.
std::vector<std::pair<std::string, Module*>> saved_modules(Module&);
/// Whether LoraOptions::modules_to_save names a module.
bool is_saved_module(std::string_view name, const std::vector<std::string>& modules_to_save);

/// What an adapter consists of, with names from the module: the parameters of the updates, parameters and
/// persistent buffers of modules_to_save, and tensors_to_save.
struct AdapterTensors {
  std::vector<std::pair<std::string, Parameter*>> parameters;
  std::vector<std::pair<std::string, ModuleBuffer*>> buffers;
};
/// Empty without LoRA.
AdapterTensors adapter_tensors(Module&);
/// Adds to LoraOptions::tensors_to_save of a module that has LoRA.
void save_with_adapter(Module&, const std::vector<std::string>& names);
/// "LoRA r 8, lora_alpha 16, 24 layers: 294912 of 124734720 elements are trained (0.24 %)"; empty without.
std::string describe_lora(Module&);

/// A low-rank update: scale · B · A, of a weight of out · in elements.
struct LowRankFactors {
  std::size_t in = 0, out = 0, r = 0;
  float scale = 1;
  bool in_out = false;          ///< the weight is [in, out]
  std::span<const float> a, b;  ///< [r, in], [out, r]
};
/// Adds the update to elements [begin, begin + weight.size()) of a weight. Each is computed in double and
/// rounded once.
void merge_lora(const LowRankFactors&, std::size_t begin, std::span<float> weight);

}  // namespace rz
