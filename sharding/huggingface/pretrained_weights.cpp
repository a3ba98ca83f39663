#include "sharding/huggingface/pretrained_weights.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <set>
#include <string_view>

#include "autograd_lite/nn/init.h"
#include "autograd_lite/nn/module.h"
#include "comm/core/error.h"
#include "sharding/checkpoint/model_tensors.h"
#include "sharding/checkpoint/open_tensors.h"
#include "sharding/io/text.h"

namespace rz {
namespace {

/// Makes "a; b; c", each part with its heading.
void add_problem(std::string& text, const char* heading, const std::vector<std::string>& names) {
  if (!names.empty()) text += concat(text.empty() ? "" : "; ", heading, " ", listed(names));
}

std::vector<std::string> names_of(Module& module) {
  std::vector<std::string> names;
  for (const auto& [name, p] : module.named_parameters()) names.push_back(name);
  for (const auto& [name, b] : persistent_buffers(module)) names.push_back(name);
  return names;
}

bool is_transposed(const TensorInfo& entry, const Shape& shape) {
  return shape.dims() == 2 && shape[0] != shape[1] &&
         entry.shape == std::vector<std::uint64_t>{shape[1], shape[0]};
}

}  // namespace

PretrainedWeights::PretrainedWeights(const std::string& path, Module& module, const LoadOptions& options)
    : files_(open_tensors(path)),
      names_(files_, names_of(module), options.prefix),
      seed_(options.seed),
      nonfinite_(options.nonfinite) {
  const std::vector<std::string> model = names_of(module);
  const auto parameters = module.named_parameters();
  match(parameters);
  match_buffers(persistent_buffers(module));
  const Parameter* table = nullptr;
  for (const auto& [name, p] : parameters)
    if (names_.is_table(name) && entries_.contains(p)) table = p;
  const bool tied = table && std::ranges::find(model, names_.head()) == model.end();
  const TensorInfo* head = tied ? names_.find(names_.head()) : nullptr;
  find_unexpected(head, model);
  check(options.strict, model);
  if (head) check_tied_head(*head, *entries_.at(table));
}

void PretrainedWeights::match(const std::vector<std::pair<std::string, Parameter*>>& parameters) {
  for (const auto& [name, p] : parameters) {
    const TensorInfo* entry = names_.find(name);
    if (!entry) {
      missing_.push_back(name);
      initialized_.insert(p);
      continue;
    }
    entries_[p] = entry;
    if (const std::string why = mismatch(*entry, p->global_shape()); !why.empty()) mismatched_.push_back(why);
    transposed_ += is_transposed(*entry, p->global_shape());
  }
}

void PretrainedWeights::match_buffers(const std::vector<std::pair<std::string, ModuleBuffer*>>& buffers) {
  for (const auto& [name, b] : buffers) {
    const TensorInfo* entry = names_.find(name);
    if (!entry) {
      if (b->shape.count() > 0) missing_.push_back(name);
      continue;
    }
    buffers_.emplace_back(b, entry);
    if (const std::string why = mismatch(*entry, *b); !why.empty()) mismatched_.push_back(why);
  }
}

void PretrainedWeights::find_unexpected(const TensorInfo* head, const std::vector<std::string>& model) {
  std::set<const TensorInfo*> used{head};
  for (const auto& [b, entry] : buffers_) used.insert(entry);
  for (const auto& [p, entry] : entries_) used.insert(entry);
  for (const auto& [name, entry] : names_.tensors())
    if (!used.contains(entry) && !names_.is_ignored(name, *entry, model)) unexpected_.push_back(entry->name);
}

void PretrainedWeights::check(bool strict, const std::vector<std::string>& model) const {
  std::string problems;
  if (strict) add_problem(problems, "missing:", missing_);
  add_problem(problems, "wrong:", mismatched_);
  if (strict) add_problem(problems, "not in the model:", unexpected_);
  const bool nothing = entries_.empty() && buffers_.empty() && !missing_.empty();
  if (problems.empty() && !nothing) return;
  std::string remedy;
  if (const std::string prefix = names_.likely_prefix(model); !prefix.empty())
    remedy =
        concat("; the names behind '", prefix, "' fit: give LoadOptions::prefix, or a file of these alone");
  if (transposed_ > 0 && transposed_ == mismatched_.size())
    remedy +=
        "; these are transposed: a layer of the model has [in, out] (Conv1D) where the file has [out, in] "
        "(Linear), or the reverse";
  require(problems.empty(), Errc::config, escaped(files_.path()),
          ": does not fit the model: ", escaped(problems), escaped(remedy));
  fail(Errc::config, escaped(files_.path()), ": nothing of it is in the model, which begins with '",
       escaped(missing_[0]), "', and the file with '", escaped(unexpected_.empty() ? "" : unexpected_[0]),
       "'", remedy.empty() ? "; give the weights of this model" : escaped(remedy));
}

std::string PretrainedWeights::describe() const {
  std::string text = files_.choice();
  const auto add = [&](const auto&... parts) { text += concat(text.empty() ? "" : "; ", parts...); };
  if (!names_.left_out().empty()) add("without the prefix '", escaped(names_.left_out()), "'");
  if (!missing_.empty()) add("not in the file: ", escaped(listed(missing_)));
  if (!unexpected_.empty()) add("not in the model: ", escaped(listed(unexpected_)));
  return text;
}

void PretrainedWeights::check_tied_head(const TensorInfo& head, const TensorInfo& table) const {
  bool equal = head.shape == table.shape;
  std::array<float, 4096> a, b;
  for (std::uint64_t at = 0; equal && at < table.count; at += a.size()) {
    const std::size_t n = std::min<std::uint64_t>(a.size(), table.count - at);
    files_.read_f32(head, at, std::span(a).first(n));
    files_.read_f32(table, at, std::span(b).first(n));
    equal = std::equal(a.begin(), a.begin() + static_cast<std::ptrdiff_t>(n), b.begin());
  }
  require(equal, Errc::config, files_.path(), ": ", names_.head(), " differs from ", table.name,
          " though the model ties them; set tie_word_embeddings to false");
}

void PretrainedWeights::require_finite(const Parameter& p, const TensorInfo& t, std::uint64_t begin,
                                       std::span<const float> values) const {
  if (nonfinite_) return;
  const auto bad = std::ranges::find_if(values, [](float x) { return !std::isfinite(x); });
  if (bad == values.end()) return;
  const std::uint64_t element = begin + static_cast<std::uint64_t>(bad - values.begin());
  fail(Errc::diverged, escaped(concat(files_.path(), ": ", t.name, '[', p.box().index(element), "] is ",
                                      std::isnan(*bad) ? "nan"
                                      : *bad < 0       ? "-inf"
                                                       : "inf",
                                      "; the file is damaged or its run diverged: give an earlier one")));
}

void PretrainedWeights::read(const Parameter& p, Range elements, float* out) const {
  if (initialized_.contains(&p)) {
    init_slice(p, {out, elements.count()}, elements.begin, seed_);
    return;
  }
  const auto found = entries_.find(&p);
  require(found != entries_.end(), Errc::invalid_argument, p.name,
          " is not a parameter of the module whose weights are read");
  read_parameter(files_, *found->second, p, elements, out);
  require_finite(p, *found->second, elements.begin, {out, elements.count()});
}

void PretrainedWeights::read_buffers(const Stream& stream) const {
  for (const auto& [b, entry] : buffers_) read_buffer(files_, *entry, *b, stream);
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
  if (values.filled()) selected = [&](const Parameter& p) { return weights.contains(p); };
  values.fill(write, selected);
  weights.read_buffers(stream);
  return weights;
}

PretrainedWeights load_pretrained(Module& module, const std::string& path, const LoadOptions& options,
                                  const Stream& stream) {
  PretrainedWeights weights(path, module, options);
  for (const Parameter* p : module.parameters()) {
    require(p->value.defined(), Errc::invalid_argument, p->name,
            " has no memory; call allocate_parameters() first");
    std::vector<float> values(p->count());
    weights.read(*p, {0, p->count()}, values.data());
    p->value.assign(std::span<const float>(values), stream);
  }
  weights.read_buffers(stream);
  return weights;
}

}  // namespace rz
