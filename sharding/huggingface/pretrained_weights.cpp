#include "sharding/huggingface/pretrained_weights.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <set>
#include <span>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "autograd_lite/models/lora.h"
#include "autograd_lite/nn/init.h"
#include "autograd_lite/nn/layers.h"
#include "comm/core/error.h"
#include "sharding/checkpoint/model_tensors.h"
#include "sharding/checkpoint/open_tensors.h"
#include "sharding/checkpoint/tensor_source.h"
#include "sharding/huggingface/families.h"
#include "sharding/huggingface/gpt2_config.h"
#include "sharding/huggingface/merge_adapter.h"
#include "sharding/huggingface/weight_names.h"
#include "sharding/io/text.h"
#include "sharding/strategy/strategy.h"

namespace rz {
namespace {

/// Makes "a; b; c", each part with its heading.
void add_problem(std::string& text, const char* heading, const std::vector<std::string>& names) {
  if (!names.empty()) text += concat(text.empty() ? "" : "; ", heading, " ", listed(names));
}

std::vector<std::string> tensor_names(Module& module) {
  std::vector<std::string> names;
  for (const auto& [name, p] : module.named_parameters()) names.push_back(name);
  for (const auto& [name, b] : persistent_buffers(module)) names.push_back(name);
  return names;
}

/// That of the model's family; GPT-2's for other modules.
const NameTable& name_table(const Module& module) {
  const auto* model = dynamic_cast<const LanguageModel*>(&module);
  return model ? family_of(*model).names : gpt2_family.names;
}

/// The files of a path; of a run with LoRA as the module takes them.
TensorSource open_weights(const std::string& path, Module& module) {
  TensorSource files = open_tensors(path);
  if (!lora_options(module)) return merge_checkpoint(files);
  require_same_adapter(files, module);
  return files;
}

bool is_transposed(const TensorInfo& entry, const Shape& shape) {
  return shape.dims() == 2 && shape[0] != shape[1] &&
         entry.shape == std::vector<std::uint64_t>{shape[1], shape[0]};
}

}  // namespace

struct PretrainedWeights::State {
  State(const std::string& path, Module&, const LoadOptions&);

  void match(const std::vector<std::pair<std::string, Parameter*>>&);
  template <class T>
  void add_others(const std::vector<std::pair<std::string, T*>>& all,
                  std::vector<std::pair<std::string, T*>>& selected);
  void leave_out_updates(Module&);
  void match_buffers(const std::vector<std::pair<std::string, ModuleBuffer*>>&);
  void find_unexpected(const TensorInfo* head, const std::vector<std::string>& model);
  void check(bool strict, const std::vector<std::string>& model) const;
  void check_tied_head(const TensorInfo& head, const TensorInfo& table) const;
  void require_finite(const Parameter&, const TensorInfo&, std::uint64_t begin, std::span<const float>) const;

  TensorSource files;
  WeightNames names;
  std::uint64_t seed;
  bool nonfinite;
  struct Entry {
    const TensorInfo* tensor;
    Parameter* parameter;
  };
  std::unordered_map<const Parameter*, Entry> entries;
  std::vector<std::pair<ModuleBuffer*, const TensorInfo*>> buffers;
  std::unordered_set<const Parameter*> initialized;  // parameters that are missing, or left out by `only`
  std::unordered_set<const Parameter*> updates;      // of LoRA, of which the files have none
  std::vector<std::string> missing, unexpected, mismatched, others;
  std::size_t transposed = 0;  // of mismatched
};

PretrainedWeights::State::State(const std::string& path, Module& module, const LoadOptions& options)
    : files(open_weights(path, module)),
      names(files, tensor_names(module), options.prefix, name_table(module)),
      seed(options.seed),
      nonfinite(options.nonfinite) {
  const std::vector<std::string> model = tensor_names(module);
  auto parameters = module.named_parameters();
  auto saved_buffers = persistent_buffers(module);
  for (const auto& [name, p] : parameters) initialized.insert(p);
  select_only(options.only, parameters, saved_buffers);
  if (options.others_if_present) {
    add_others(module.named_parameters(), parameters);
    add_others(persistent_buffers(module), saved_buffers);
  }
  match(parameters);
  if (options.only.empty()) leave_out_updates(module);
  match_buffers(saved_buffers);
  const Parameter* table = nullptr;
  for (const auto& [name, p] : parameters)
    if (names.is_table(name) && entries.contains(p)) table = p;
  const bool tied = table && std::ranges::find(model, names.head()) == model.end();
  const TensorInfo* head = tied ? names.find(names.head()) : nullptr;
  find_unexpected(head, model);
  check(options.strict, model);
  if (head) check_tied_head(*head, *entries.at(table).tensor);
}

void PretrainedWeights::State::match(const std::vector<std::pair<std::string, Parameter*>>& parameters) {
  for (const auto& [name, p] : parameters) {
    const TensorInfo* entry = names.find(name);
    if (!entry) {
      missing.push_back(name);
      continue;
    }
    entries[p] = {entry, p};
    initialized.erase(p);
    if (const std::string why = mismatch(*entry, p->global_shape()); !why.empty()) mismatched.push_back(why);
    transposed += is_transposed(*entry, p->global_shape());
  }
}

/// Adds those of which the files have a tensor.
template <class T>
void PretrainedWeights::State::add_others(const std::vector<std::pair<std::string, T*>>& all,
                                          std::vector<std::pair<std::string, T*>>& selected) {
  for (const auto& named : all) {
    if (std::ranges::find(selected, named) != selected.end() || !names.find(named.first)) continue;
    selected.push_back(named);
    others.push_back(named.first);
  }
}

/// The files are then of the model without LoRA.
void PretrainedWeights::State::leave_out_updates(Module& module) {
  std::unordered_set<const Parameter*> all;
  for (const auto& [name, layer] : lora_layers(module)) all.insert({&layer->lora->a, &layer->lora->b});
  if (std::ranges::any_of(all, [&](const Parameter* p) { return entries.contains(p); })) return;
  for (const auto& [name, p] : module.named_parameters())
    if (all.contains(p) && std::erase(missing, name) > 0) updates.insert(p);
}

void PretrainedWeights::State::match_buffers(
    const std::vector<std::pair<std::string, ModuleBuffer*>>& named) {
  for (const auto& [name, b] : named) {
    const TensorInfo* entry = names.find(name);
    if (!entry) {
      if (b->shape.count() > 0) missing.push_back(name);
      continue;
    }
    buffers.emplace_back(b, entry);
    if (const std::string why = mismatch(*entry, *b); !why.empty()) mismatched.push_back(why);
  }
}

void PretrainedWeights::State::find_unexpected(const TensorInfo* head,
                                               const std::vector<std::string>& model) {
  std::set<const TensorInfo*> used{head};
  for (const std::string& name : model) used.insert(names.find(name));  // also of what `only` leaves out
  for (const auto& [name, entry] : names.tensors())
    if (!used.contains(entry) && !names.is_ignored(name, *entry, model)) unexpected.push_back(entry->name);
}

void PretrainedWeights::State::check(bool strict, const std::vector<std::string>& model) const {
  std::string problems;
  if (strict) add_problem(problems, "missing:", missing);
  add_problem(problems, "wrong:", mismatched);
  if (strict) add_problem(problems, "not in the model:", unexpected);
  const bool nothing = entries.empty() && buffers.empty() && !(missing.empty() && updates.empty());
  if (problems.empty() && !nothing) return;
  std::string remedy;
  const auto has_update = [](const std::string& name) { return name.find(".lora_") != name.npos; };
  if (const std::string prefix = names.likely_prefix(model); !prefix.empty())
    remedy =
        concat("; the names behind '", prefix, "' fit: give LoadOptions::prefix, or a file of these alone");
  else if (std::ranges::any_of(unexpected, has_update))
    remedy =
        "; updates of LoRA are read into the linear layers that have one: call add_lora() before, with their "
        "options, or give the merged model";
  else if (strict && missing.empty() && mismatched.empty() && !entries.empty())
    remedy = "; LoadOptions::strict = false leaves them out";
  if (transposed > 0 && transposed == mismatched.size())
    remedy +=
        "; these are transposed: a layer of the model has [in, out] (Conv1D) where the file has [out, in] "
        "(Linear), or the reverse";
  require(problems.empty(), Errc::config, escaped(files.path()),
          ": does not fit the model: ", escaped(problems), escaped(remedy));
  fail(Errc::config, escaped(files.path()), ": nothing of it is in the model, which begins with '",
       escaped(missing.empty() ? model[0] : missing[0]), "', and the file with '",
       escaped(unexpected.empty() ? "" : unexpected[0]), "'",
       remedy.empty() ? "; give the weights of this model" : escaped(remedy));
}

void PretrainedWeights::State::check_tied_head(const TensorInfo& head, const TensorInfo& table) const {
  bool equal = head.shape == table.shape;
  std::array<float, 4096> a, b;
  for (std::uint64_t at = 0; equal && at < table.count; at += a.size()) {
    const std::size_t n = std::min<std::uint64_t>(a.size(), table.count - at);
    files.read_f32(head, at, std::span(a).first(n));
    files.read_f32(table, at, std::span(b).first(n));
    equal = std::equal(a.begin(), a.begin() + static_cast<std::ptrdiff_t>(n), b.begin());
  }
  require(equal, Errc::config, files.path(), ": ", names.head(), " differs from ", table.name,
          " though the model ties them; set tie_word_embeddings to false");
}

void PretrainedWeights::State::require_finite(const Parameter& p, const TensorInfo& t, std::uint64_t begin,
                                              std::span<const float> values) const {
  if (nonfinite) return;
  const auto bad = std::ranges::find_if(values, [](float x) { return !std::isfinite(x); });
  if (bad == values.end()) return;
  const std::uint64_t element = begin + static_cast<std::uint64_t>(bad - values.begin());
  fail(Errc::diverged, escaped(concat(files.path(), ": ", t.name, '[', p.box().index(element), "] is ",
                                      std::isnan(*bad) ? "nan"
                                      : *bad < 0       ? "-inf"
                                                       : "inf",
                                      "; the file is damaged or its run diverged: give an earlier one")));
}

PretrainedWeights::PretrainedWeights(const std::string& path, Module& module, const LoadOptions& options)
    : state_(std::make_shared<const State>(path, module, options)) {}

const std::vector<std::string>& PretrainedWeights::missing_keys() const { return state_->missing; }

const std::vector<std::string>& PretrainedWeights::unexpected_keys() const { return state_->unexpected; }

std::size_t PretrainedWeights::tensors() const { return state_->entries.size(); }

bool PretrainedWeights::contains(const Parameter& p) const { return state_->entries.contains(&p); }

const std::vector<std::string>& PretrainedWeights::others() const { return state_->others; }

std::string PretrainedWeights::describe() const {
  const State& s = *state_;
  std::string text = s.files.choice();
  const auto add = [&](const auto&... parts) { text += concat(text.empty() ? "" : "; ", parts...); };
  if (!s.names.left_out().empty()) add("without the prefix '", escaped(s.names.left_out()), "'");
  if (!s.missing.empty()) add("not in the file: ", escaped(listed(s.missing)));
  if (!s.unexpected.empty()) add("not in the model: ", escaped(listed(s.unexpected)));
  return text;
}

void PretrainedWeights::read(const Parameter& p, Range elements, float* out) const {
  if (state_->initialized.contains(&p)) {
    init_slice(p, {out, elements.count()}, elements.begin, state_->seed);
    return;
  }
  const auto found = state_->entries.find(&p);
  require(found != state_->entries.end(), Errc::invalid_argument, p.name,
          " is not a parameter of the module whose weights are read");
  const TensorInfo& tensor = *found->second.tensor;
  read_parameter(state_->files, tensor, p, elements, out);
  state_->require_finite(p, tensor, elements.begin, {out, elements.count()});
  found->second.parameter->loaded_from = state_->files.path();
}

void PretrainedWeights::read_buffers(const Stream& stream) const {
  for (const auto& [b, entry] : state_->buffers) read_buffer(state_->files, *entry, *b, stream);
}

bool PretrainedWeights::writes(const Parameter& p) const {
  return state_->entries.contains(&p) || state_->updates.contains(&p);
}

PretrainedWeights load_pretrained(Strategy& strategy, Module& module, const std::string& path,
                                  const LoadOptions& options, const Stream& stream) {
  PretrainedWeights weights(path, module, options);
  ParameterValues& values = strategy.values();
  const auto write = [&](const Parameter& p, Range elements, float* out) {
    if (weights.contains(p)) return weights.read(p, elements, out);
    init_slice(p, {out, elements.count()}, elements.begin, options.seed);
  };
  ParameterValues::Selection selected;
  if (values.filled()) selected = [&](const Parameter& p) { return weights.writes(p); };
  values.fill(write, selected);
  weights.read_buffers(stream);
  return weights;
}

PretrainedWeights load_pretrained(Module& module, const std::string& path, const LoadOptions& options,
                                  const Stream& stream) {
  PretrainedWeights weights(path, module, options);
  auto parameters = module.named_parameters();
  auto buffers = persistent_buffers(module);
  select_only(options.only, parameters, buffers);
  for (const auto& named : module.named_parameters())
    if (std::ranges::find(weights.others(), named.first) != weights.others().end())
      parameters.push_back(named);
  for (const auto& [name, p] : parameters) {
    require(p->value.defined(), Errc::invalid_argument, p->name,
            " has no memory; call allocate_parameters() first");
    std::vector<float> values(p->count());
    weights.read(*p, {0, p->count()}, values.data());
    if (p->value.dtype() == DType::f32) {
      p->value.assign(std::span<const float>(values), stream);
    } else {
      const Tensor rounded = Tensor::empty(p->shape, p->value.dtype());
      ops::copy(rounded, Tensor::borrow(values.data(), p->shape), {});
      p->value.assign(std::span<const std::byte>(rounded.raw(), rounded.bytes()), stream);
    }
  }
  weights.read_buffers(stream);
  return weights;
}

}  // namespace rz
