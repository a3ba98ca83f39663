#include "sharding/config/keys.h"

#include <algorithm>

#include "comm/core/error.h"
#include "comm/core/lazy.h"
#include "sharding/config/arguments.h"

namespace rz::ds {
namespace {

using nlohmann::json;

std::vector<ObjectSpec> all_objects() {
  std::vector<ObjectSpec> all;
  for (const auto part : {general_objects(), ringzero_objects(), optimizer_objects(), scheduler_objects(),
                          precision_objects(), zero_objects(), reporting_objects()})
    all.insert(all.end(), part.begin(), part.end());
  return all;
}

constexpr std::pair<DType, const char*> dtype_words[] = {
    {DType::f32, "fp32"}, {DType::f16, "fp16"}, {DType::bf16, "bf16"}};

}  // namespace

std::span<const ObjectSpec> objects() {
  static constinit Lazy<std::vector<ObjectSpec>> all;
  return all.get(all_objects);
}

const ObjectSpec* find_object(std::string_view path, std::string_view variant) {
  const auto found = std::ranges::find_if(
      objects(), [&](const ObjectSpec& o) { return o.path == path && o.variant == variant; });
  return found == objects().end() ? nullptr : &*found;
}

std::string_view KeySpec::meaning_of_auto() const {
  return by_hidden_size ? "the model's hidden size" : argument ? argument_spec(argument).shown() : "";
}

json KeySpec::initial() const {
  if (fallback != nullptr) return json::parse(fallback);
  json value = field.initial(*this);
  const bool real = kind == Kind::number || kind == Kind::per_group;
  return real && value.is_number() ? json(value.get<double>()) : value;
}

int word_index(const KeySpec& k, const json& word) {
  const json words = json::parse(k.values);
  return static_cast<int>(std::ranges::find(words, word) - words.begin());
}

json word_at(const KeySpec& k, int index) {
  return json::parse(k.values).at(static_cast<std::size_t>(index));
}

DType dtype_of(const json& word) {
  for (const auto& [dtype, text] : dtype_words)
    if (word == text) return dtype;
  fail(Errc::invalid_argument, "no dtype ", word.dump());
}

const char* word_of(DType type) {
  for (const auto& [dtype, text] : dtype_words)
    if (type == dtype) return text;
  fail(Errc::invalid_argument, "no dtype of a configuration");
}

}  // namespace rz::ds
