#include "sharding/config/keys.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>

#include "comm/core/error.h"
#include "comm/core/lazy.h"
#include "sharding/io/json.h"

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

std::string lower_case(std::string text) {
  std::ranges::transform(text, text.begin(), [](unsigned char c) { return std::tolower(c); });
  return text;
}

json checked_choice(const JsonObject& object, const KeySpec& k) {
  const std::string word = lower_case(object.text(k.key, ""));
  std::string all;
  for (const json& choice : json::parse(k.values)) {
    if (lower_case(choice.get<std::string>()) == word) return choice;
    all += (all.empty() ? "" : " or ") + choice.get<std::string>();
  }
  object.fail_at(k.key, concat("unknown choice \"", object.text(k.key, ""), "\"; choose ", all));
}

json checked_dtype(const JsonObject& object, const KeySpec& k) {
  constexpr std::pair<const char*, const char*> names[] = {
      {"fp32", "fp32"}, {"float32", "fp32"},  {"float", "fp32"},         {"torch.float32", "fp32"},
      {"fp16", "fp16"}, {"float16", "fp16"},  {"half", "fp16"},          {"torch.float16", "fp16"},
      {"bf16", "bf16"}, {"bfloat16", "bf16"}, {"torch.bfloat16", "bf16"}};
  const std::string word = lower_case(object.text(k.key, ""));
  for (const auto& [text, dtype] : names)
    if (word == text) return dtype;
  object.fail_at(k.key, concat("unknown type \"", word, "\"; choose fp32, fp16 or bf16"));
}

json checked_betas(const JsonObject& object, const KeySpec& k) {
  const json& betas = object.at(k.key);
  const auto valid = [](const json& b) {
    return b.is_number() && b.get<double>() >= 0 && b.get<double>() < 1;
  };
  if (!betas.is_array() || betas.size() != 2 || !std::ranges::all_of(betas, valid))
    object.fail_at(k.key, concat("expected two numbers from 0 to below 1, found ", to_display(betas)));
  return betas;
}

json checked_per_group(const JsonObject& object, const KeySpec& k) {
  const json& values = object.at(k.key);
  if (!values.is_array()) return object.number(k.key, 0, k.min, k.max);
  const auto valid = [&](const json& v) {
    return v.is_number() && v.get<double>() >= k.min && v.get<double>() <= k.max;
  };
  if (values.empty() || !std::ranges::all_of(values, valid))
    object.fail_at(k.key,
                   concat("expected a number, or one for each parameter group, found ", to_display(values)));
  return values;
}

json checked_integers(const JsonObject& object, const KeySpec& k) {
  const json& values = object.at(k.key);
  if (!values.is_array() || !std::ranges::all_of(values, [](const json& v) { return v.is_number_integer(); }))
    object.fail_at(k.key, concat("expected a list of whole numbers, found ", to_display(values)));
  return values;
}

std::optional<json> as_number(std::string_view text) {
  const auto first = text.find_first_not_of(" \t\r\n");
  if (first == text.npos) return std::nullopt;
  text = text.substr(first, text.find_last_not_of(" \t\r\n") + 1 - first);
  if (text.starts_with('+')) text.remove_prefix(1);
  const char* const end = text.data() + text.size();
  std::int64_t whole = 0;
  if (const auto r = std::from_chars(text.data(), end, whole); r.ec == std::errc() && r.ptr == end)
    return whole;
  double real = 0;
  const auto r = std::from_chars(text.data(), end, real);
  if (r.ec != std::errc() || r.ptr != end || !std::isfinite(real)) return std::nullopt;
  return real;
}

/// The words of pydantic.
std::optional<bool> as_boolean(std::string_view text) {
  const std::string word = lower_case(std::string(text));
  for (const char* yes : {"true", "t", "yes", "y", "on", "1"})
    if (word == yes) return true;
  for (const char* no : {"false", "f", "no", "n", "off", "0"})
    if (word == no) return false;
  return std::nullopt;
}

bool is_infinity(const json& value) {
  if (!value.is_string()) return false;
  const std::string word = lower_case(value.get<std::string>());
  return word == "inf" || word == "infinity";
}

/// The value, or the elements of a list, without quotes where the key is a number, or true or false.
json in_form_of(const KeySpec& k, const json& value) {
  const auto number = [](const json& v) {
    return v.is_string() ? as_number(v.get<std::string>()).value_or(v) : v;
  };
  switch (k.kind) {
    case Kind::boolean:
      if (value.is_string())
        if (const auto word = as_boolean(value.get<std::string>())) return *word;
      return value.is_number() && (value == 0 || value == 1) ? json(value == 1) : value;
    case Kind::integer:
      if (k.infinite && is_infinity(value)) return static_cast<std::int64_t>(k.max);
      return number(value);
    case Kind::number:
    case Kind::betas:
    case Kind::per_group:
    case Kind::integers: {
      if (!value.is_array()) return number(value);
      json all = json::array();
      for (const json& v : value) all.push_back(number(v));
      return all;
    }
    default:
      return value;
  }
}

json checked(const JsonObject& object, const KeySpec& k) {
  const json& value = object.at(k.key);
  if (value.is_null() && !k.is_required() && k.initial().is_null()) return value;
  switch (k.kind) {
    case Kind::boolean:
      return object.boolean(k.key, false);
    case Kind::integer:
      return object.integer(k.key, 0, static_cast<std::int64_t>(k.min),
                            k.max < 9.2e18 ? static_cast<std::int64_t>(k.max) : INT64_MAX);
    case Kind::number:
      return object.number(k.key, 0, k.min, k.max);
    case Kind::text:
      return object.text(k.key, "");
    case Kind::choice:
      return checked_choice(object, k);
    case Kind::dtype:
      return checked_dtype(object, k);
    case Kind::betas:
      return checked_betas(object, k);
    case Kind::per_group:
      return checked_per_group(object, k);
    case Kind::integers:
      return checked_integers(object, k);
    case Kind::object:
    case Kind::any:
      return value;
  }
  return value;
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

const char* name(Treatment treatment) {
  constexpr const char* names[] = {"applied", "no effect", "always so", "not applied yet", "refused"};
  return names[static_cast<std::size_t>(treatment)];
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

json checked_value(const json& value, const KeySpec& k, const std::string& file, const std::string& path) {
  const json holder{{k.key, in_form_of(k, value)}};
  return checked(JsonObject(holder, file, path), k);
}

json without_quotes(const json& value) {
  if (!value.is_string()) return value;
  const auto text = value.get<std::string>();
  if (auto number = as_number(text)) return *number;
  const auto word = as_boolean(text);
  return word ? json(*word) : value;
}

}  // namespace rz::ds
