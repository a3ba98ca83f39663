#include "sharding/huggingface/pretrained_weights.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <set>
#include <string_view>

#include "autograd_lite/nn/init.h"
#include "autograd_lite/nn/module.h"
#include "comm/core/error.h"
#include "sharding/checkpoint/float_values.h"
#include "sharding/checkpoint/safetensors.h"
#include "sharding/io/text.h"

namespace rz {
namespace {

std::vector<std::uint64_t> extents(const Shape& shape) {
  std::vector<std::uint64_t> out;
  for (int i = 0; i < shape.dims(); ++i) out.push_back(shape[i]);
  return out;
}

/// Whether a tensor is the mask of an attention of GPT-2: [1, 1, T, T] or a number beside the layer c_attn of
/// a model. `name` is that without prefixes; `c_attn` holds the names of these layers, "h.0.attn.".
bool is_mask(std::string_view name, const WeightTensor& t, const std::set<std::string>& c_attn) {
  constexpr std::string_view prefix = "transformer.";
  const bool is_named = (name.ends_with("attn.bias") && t.shape.size() == 4) ||
                        (name.ends_with("attn.masked_bias") && t.count == 1);
  if (!is_named) return false;
  const std::string layer(name.substr(0, name.rfind('.') + 1));
  return c_attn.contains(layer) || c_attn.contains(concat(prefix, layer)) ||
         (layer.starts_with(prefix) && c_attn.contains(layer.substr(prefix.size())));
}

bool is_wte(std::string_view name) { return name == "transformer.wte.weight" || name == "wte.weight"; }

bool is_readable(const WeightTensor& entry) { return is_float_dtype(entry.dtype); }

/// Why the tensor cannot be one of this shape; empty if it can.
std::string mismatch(const WeightTensor& entry, const Shape& shape) {
  if (entry.shape == extents(shape)) return "";
  return concat(entry.name, " is ", name(entry.shape), " where the model has ", name(shape));
}

/// Why the tensor cannot be the parameter's.
std::string mismatch(const WeightTensor& entry, const Parameter& p) {
  if (const std::string why = mismatch(entry, p.global_shape()); !why.empty()) return why;
  return is_readable(entry) ? ""
                            : concat(entry.name, " is of dtype ", entry.dtype, " where a float is needed");
}

bool has_dtype_of(const WeightTensor& entry, const ModuleBuffer& b) {
  return entry.dtype == safetensors_name(b.dtype);
}

/// Why the tensor cannot be the buffer's.
std::string mismatch(const WeightTensor& entry, const ModuleBuffer& b) {
  if (const std::string why = mismatch(entry, b.shape); !why.empty()) return why;
  if (has_dtype_of(entry, b) || (b.dtype == DType::f32 && is_readable(entry))) return "";
  return concat(entry.name, " is of dtype ", entry.dtype, " where the buffer has ",
                safetensors_name(b.dtype));
}

/// "a; b; c", each part with its heading.
class ProblemList {
 public:
  void add(const char* heading, const std::vector<std::string>& names) {
    if (!names.empty()) text_ += concat(text_.empty() ? "" : "; ", heading, " ", listed(names));
  }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

std::vector<std::string> names_of(Module& module) {
  std::vector<std::string> names;
  for (const auto& [name, p] : module.named_parameters()) names.push_back(name);
  for (const auto& [name, b] : persistent_buffers(module)) names.push_back(name);
  return names;
}

bool is_transposed(const WeightTensor& entry, const Shape& shape) {
  return shape.dims() == 2 && shape[0] != shape[1] &&
         entry.shape == std::vector<std::uint64_t>{shape[1], shape[0]};
}

}  // namespace

PretrainedWeights::PretrainedWeights(const std::string& path, Module& module, const LoadOptions& options)
    : files_(WeightFiles::open(path)),
      names_(files_, names_of(module), options.prefix),
      seed_(options.seed),
      nonfinite_(options.nonfinite) {
  const auto parameters = module.named_parameters();
  match(parameters);
  match_buffers(persistent_buffers(module));
  const Parameter* wte = nullptr;
  bool has_head = false;
  for (const auto& [name, p] : parameters) {
    if (is_wte(name)) wte = p;
    has_head |= name == lm_head_weight;
  }
  const bool tied_head =
      wte && entries_.contains(wte) && !has_head && names_.find(std::string(lm_head_weight));
  std::set<std::string> c_attn;
  for (const auto& [name, p] : parameters)
    if (const auto at = name.rfind("attn.c_attn."); at != name.npos) c_attn.insert(name.substr(0, at + 5));
  find_unexpected(tied_head, c_attn);
  check(options.strict, names_of(module));
  if (tied_head) check_tied_head(*wte);
}

void PretrainedWeights::match(const std::vector<std::pair<std::string, Parameter*>>& parameters) {
  for (const auto& [name, p] : parameters) {
    const WeightTensor* entry = names_.find(name);
    if (!entry) {
      missing_.push_back(name);
      initialized_.insert(p);
      continue;
    }
    entries_[p] = entry;
    if (const std::string why = mismatch(*entry, *p); !why.empty()) mismatched_.push_back(why);
    transposed_ += is_transposed(*entry, p->global_shape());
  }
}

void PretrainedWeights::match_buffers(const std::vector<std::pair<std::string, ModuleBuffer*>>& buffers) {
  for (const auto& [name, b] : buffers) {
    const WeightTensor* entry = names_.find(name);
    if (!entry) {
      missing_.push_back(name);
      continue;
    }
    buffers_.emplace_back(b, entry);
    if (const std::string why = mismatch(*entry, *b); !why.empty()) mismatched_.push_back(why);
  }
}

void PretrainedWeights::find_unexpected(bool tied_head, const std::set<std::string>& c_attn) {
  std::set<const WeightTensor*> used;
  for (const auto& [b, entry] : buffers_) used.insert(entry);
  for (const auto& [p, entry] : entries_) used.insert(entry);
  for (const auto& [name, entry] : names_.tensors())
    if (!used.contains(entry) && !is_mask(name, *entry, c_attn) && !(tied_head && name == lm_head_weight))
      unexpected_.push_back(entry->name);
}

void PretrainedWeights::check(bool strict, const std::vector<std::string>& model) const {
  ProblemList problems;
  if (strict) problems.add("missing:", missing_);
  problems.add("wrong:", mismatched_);
  if (strict) problems.add("not in the model:", unexpected_);
  const bool nothing = entries_.empty() && buffers_.empty() && !missing_.empty();
  if (problems.text().empty() && !nothing) return;
  std::string remedy;
  if (const std::string prefix = names_.likely_prefix(model); !prefix.empty())
    remedy =
        concat("; the names behind '", prefix, "' fit: give LoadOptions::prefix, or a file of these alone");
  if (transposed_ > 0 && transposed_ == mismatched_.size())
    remedy +=
        "; these are transposed: a layer of the model has [in, out] (Conv1D) where the file has [out, in] "
        "(Linear), or the reverse";
  require(problems.text().empty(), Errc::config, escaped(files_.path()),
          ": does not fit the model: ", escaped(problems.text()), escaped(remedy));
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

void PretrainedWeights::check_tied_head(const Parameter& wte) const {
  const WeightTensor &tied = *names_.find(std::string(lm_head_weight)), &table = *entries_.at(&wte);
  bool equal = tied.shape == table.shape;
  std::array<float, 4096> a, b;
  for (std::uint64_t at = 0; equal && at < table.count; at += a.size()) {
    const std::size_t n = std::min<std::uint64_t>(a.size(), table.count - at);
    files_.read_f32(tied, at, std::span(a).first(n));
    files_.read_f32(table, at, std::span(b).first(n));
    equal = std::equal(a.begin(), a.begin() + static_cast<std::ptrdiff_t>(n), b.begin());
  }
  require(equal, Errc::config, files_.path(), ": ", lm_head_weight, " differs from ", table.name,
          " though the model ties them; set tie_word_embeddings to false");
}

void PretrainedWeights::require_finite(const WeightTensor& t, std::uint64_t begin,
                                       std::span<const float> values) const {
  if (nonfinite_) return;
  const auto bad = std::ranges::find_if(values, [](float x) { return !std::isfinite(x); });
  if (bad == values.end()) return;
  fail(Errc::diverged, escaped(concat(files_.path(), ": ", t.name, '[',
                                      begin + static_cast<std::uint64_t>(bad - values.begin()), "] is ",
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
  const Slice part = p.slice.value_or(Slice(p.shape));
  part.for_each_run(elements.begin, elements.end,
                    [&](std::size_t element, std::size_t index, std::size_t count) {
                      const std::span<float> values(out + (element - elements.begin), count);
                      files_.read_f32(*found->second, index, values);
                      require_finite(*found->second, index, values);
                    });
}

void PretrainedWeights::read_buffers(const Stream& stream) const {
  for (const auto& [b, entry] : buffers_) {
    require(b->value.defined(), Errc::invalid_argument, "the buffer ", b->name,
            " has no memory; make the strategy, or call allocate_buffers(), first");
    const Tensor on_host = Tensor::empty(b->shape, b->dtype);
    if (has_dtype_of(*entry, *b))
      files_.read_bytes(*entry, {on_host.raw(), on_host.bytes()});
    else
      files_.read_f32(*entry, 0, {on_host.data<float>(), on_host.count()});
    b->value.assign(std::span<const std::byte>(on_host.raw(), on_host.bytes()), stream);
  }
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
