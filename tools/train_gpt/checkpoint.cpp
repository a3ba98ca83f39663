#include "tools/train_gpt/checkpoint.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>
#include <set>

#include "comm/core/error.h"

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

/// "a; b; c", each part under its heading.
class Complaints {
 public:
  void add(const char* heading, const std::vector<std::string>& names) {
    if (names.empty()) return;
    text_ += str(text_.empty() ? "" : "; ", heading, " ");
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
          str(entry->name, " is ", name(entry->shape), " where the model has ", name(p->shape)));
    else if (std::ranges::find(readable, entry->dtype) == readable.end())
      misshapen.push_back(str(entry->name, " is of dtype ", entry->dtype, " where a float is needed"));
  }
  const bool tied_head = wte && !has_head && file_.find("lm_head.weight");
  for (const auto& entry : file_.tensors())
    if (!used.contains(entry.name) && !is_mask(entry.name) && !(tied_head && entry.name == "lm_head.weight"))
      extra.push_back(entry.name);
  Complaints complaints;
  complaints.add("missing:", missing);
  complaints.add("wrong:", misshapen);
  complaints.add("not in the model:", extra);
  require(complaints.text().empty(), Errc::config, file_.path(),
          ": does not fit the model (--model): ", complaints.text());
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

// ---- fresh weights

namespace {

/// The finaliser of SplitMix64 (Steele et al., 2014, doi:10.1145/2660193.2660195).
std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

std::uint64_t key_of(const std::string& name, std::uint64_t seed) {
  std::uint64_t key = mix(seed);
  for (const unsigned char c : name) key = mix(key ^ c);
  return key;
}

/// Elements 2i and 2i + 1 of a row of normal deviates (Box and Muller, 1958, doi:10.1214/aoms/1177706645).
std::array<float, 2> normal_pair(std::uint64_t key, std::uint64_t i) {
  const std::uint64_t bits = mix(key ^ mix(i));
  const double u = (static_cast<double>(bits >> 32) + 1) * 0x1p-32,
               v = static_cast<double>(bits & 0xffffffffu) * 0x1p-32;
  const double radius = std::sqrt(-2 * std::log(u)), angle = 2 * std::numbers::pi * v;
  return {static_cast<float>(radius * std::cos(angle)), static_cast<float>(radius * std::sin(angle))};
}

}  // namespace

void initialise(const Parameter& p, Range elements, float* out, int layers, std::uint64_t seed) {
  if (p.shape.dims() < 2)
    return void(std::fill_n(out, elements.count(), p.name.ends_with(".weight") ? 1.0f : 0.0f));
  const bool scaled = p.name.ends_with("c_proj.weight");
  const auto deviation = static_cast<float>(scaled ? 0.02 / std::sqrt(2.0 * layers) : 0.02);
  const std::uint64_t key = key_of(p.name, seed);
  for (std::size_t i = elements.begin; i < elements.end; ++i) {
    const auto pair = normal_pair(key, i / 2);
    *out++ = deviation * pair[i % 2];
    if (i % 2 == 0 && i + 1 < elements.end) *out++ = deviation * pair[1], ++i;
  }
}

// ---- saving

void save_model(const std::string& path, std::span<Parameter* const> parameters, Strategy& strategy, int rank,
                const Stream& stream) {
  std::unique_ptr<SafetensorsWriter> writer;
  if (rank == 0) {
    std::vector<SafetensorsOut> tensors;
    for (const Parameter* p : parameters) tensors.push_back({p->name, extents(p->shape)});
    writer = std::make_unique<SafetensorsWriter>(path, tensors);
  }
  for (const Parameter* p : parameters) {
    const Tensor value = strategy.full_value(*p, stream);
    if (writer) writer->write({value.data<float>(), value.count()});
  }
  if (writer) writer->finish();
}

}  // namespace rz::train_gpt
