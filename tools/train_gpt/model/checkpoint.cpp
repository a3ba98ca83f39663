#include "tools/train_gpt/model/checkpoint.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <set>

#include "comm/core/error.h"
#include "sharding/io/text.h"
#include "tools/train_gpt/report/diverged.h"

namespace rz::train_gpt {
namespace {

constexpr std::string_view prefix = "transformer.";
constexpr std::array readable{"F32", "F16", "BF16", "F64"};

const SafetensorsEntry* find(const SafetensorsFile& file, const std::string& name) {
  if (const auto* entry = file.find(name)) return entry;
  return name.starts_with(prefix) ? file.find(std::string_view(name).substr(prefix.size())) : nullptr;
}

std::vector<std::uint64_t> extents(const Shape& shape) {
  std::vector<std::uint64_t> out;
  for (int i = 0; i < shape.dims(); ++i) out.push_back(shape[i]);
  return out;
}

bool is_mask(std::string_view name) {
  return name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias");
}

/// "a; b; c", each part with its heading.
class ProblemList {
 public:
  void add(const char* heading, const std::vector<std::string>& names) {
    if (names.empty()) return;
    text_ += concat(text_.empty() ? "" : "; ", heading, " ");
    for (const auto& name : names) text_ += (&name == &names.front() ? "" : ", ") + name;
  }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

}  // namespace

Checkpoint::Checkpoint(SafetensorsFile file, std::span<Parameter* const> parameters)
    : file_(std::move(file)) {
  std::set<std::string> used;
  std::vector<std::string> missing, misshapen, extra;
  const Parameter* wte = nullptr;
  bool has_head = false;
  for (const Parameter* p : parameters) {
    if (p->name == "transformer.wte.weight") wte = p;
    has_head |= p->name == "lm_head.weight";
    const SafetensorsEntry* entry = find(file_, p->name);
    if (!entry) {
      missing.push_back(p->name);
      continue;
    }
    used.insert(entry->name);
    entries_[p] = entry;
    if (entry->shape != extents(p->shape))
      misshapen.push_back(
          concat(entry->name, " is ", name(entry->shape), " where the model has ", name(p->shape)));
    else if (std::ranges::find(readable, entry->dtype) == readable.end())
      misshapen.push_back(concat(entry->name, " is of dtype ", entry->dtype, " where a float is needed"));
  }
  const bool tied_head = wte && !has_head && file_.find("lm_head.weight");
  for (const auto& entry : file_.tensors())
    if (!used.contains(entry.name) && !is_mask(entry.name) && !(tied_head && entry.name == "lm_head.weight"))
      extra.push_back(entry.name);
  ProblemList complaints;
  complaints.add("missing:", missing);
  complaints.add("wrong:", misshapen);
  complaints.add("not in the model:", extra);
  require(complaints.text().empty(), Errc::config, escaped(file_.path()),
          ": does not fit the model (--model): ", escaped(complaints.text()));
  if (tied_head) check_tied_head(*wte);
}

void Checkpoint::check_tied_head(const Parameter& wte) const {
  const SafetensorsEntry &head = *file_.find("lm_head.weight"), &table = *entries_.at(&wte);
  bool equal = head.shape == table.shape;
  std::array<float, 4096> a, b;
  for (std::uint64_t at = 0; equal && at < table.count; at += a.size()) {
    const std::size_t n = std::min<std::uint64_t>(a.size(), table.count - at);
    file_.read_f32(head, at, std::span(a).first(n));
    file_.read_f32(table, at, std::span(b).first(n));
    equal = std::equal(a.begin(), a.begin() + static_cast<std::ptrdiff_t>(n), b.begin());
  }
  require(equal, Errc::config, file_.path(), ": lm_head.weight differs from ", table.name,
          " though the model ties them; set tie_word_embeddings to false");
}

void Checkpoint::read(const Parameter& p, Range elements, float* out) const {
  file_.read_f32(*entries_.at(&p), elements.begin, {out, elements.count()});
}

// ---- saving

namespace {
void require_finite(const std::string& path, const Parameter& p, std::span<const float> values) {
  const auto bad = std::ranges::find_if(values, [](float x) { return !std::isfinite(x); });
  if (bad == values.end()) return;
  throw Diverged(concat(path, ": not written: ", p.name, '[', bad - values.begin(), "] is ", *bad,
                        "; --save-nonfinite writes such weights all the same"));
}
}  // namespace

void save_model(const std::string& path, std::span<Parameter* const> parameters, Strategy& strategy, int rank,
                const Stream& stream, bool nonfinite) {
  std::unique_ptr<SafetensorsWriter> writer;
  if (rank == 0) {
    std::vector<SafetensorsSpec> tensors;
    for (const Parameter* p : parameters) tensors.push_back({p->name, extents(p->shape)});
    writer = std::make_unique<SafetensorsWriter>(path, tensors);
  }
  for (const Parameter* p : parameters) {
    const Tensor value = strategy.full_value(*p, stream).on_host(stream);
    const std::span<const float> values(value.data<float>(), value.count());
    if (!nonfinite) require_finite(path, *p, values);
    if (writer) writer->write(values);
  }
  if (writer) writer->finish();
}

}  // namespace rz::train_gpt
