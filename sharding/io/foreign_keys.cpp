#include "sharding/io/foreign_keys.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>

#include "comm/core/error.h"
#include "sharding/io/json.h"

namespace rz {
namespace {

using nlohmann::json;

json checked_choice(const JsonObject& object, const std::string& key, const ValueForm& f) {
  const std::string word = lower_case(object.text(key, ""));
  std::string all;
  for (const json& choice : json::parse(f.values)) {
    if (lower_case(choice.get<std::string>()) == word) return choice;
    all += (all.empty() ? "" : " or ") + choice.get<std::string>();
  }
  object.fail_at(key, concat("unknown choice \"", object.text(key, ""), "\"; choose ", all));
}

json checked_dtype(const JsonObject& object, const std::string& key) {
  constexpr std::pair<const char*, const char*> names[] = {
      {"fp32", "fp32"}, {"float32", "fp32"},  {"float", "fp32"},         {"torch.float32", "fp32"},
      {"fp16", "fp16"}, {"float16", "fp16"},  {"half", "fp16"},          {"torch.float16", "fp16"},
      {"bf16", "bf16"}, {"bfloat16", "bf16"}, {"torch.bfloat16", "bf16"}};
  const std::string word = lower_case(object.text(key, ""));
  for (const auto& [text, dtype] : names)
    if (word == text) return dtype;
  object.fail_at(key, concat("unknown type \"", word, "\"; choose fp32, fp16 or bf16"));
}

json checked_betas(const JsonObject& object, const std::string& key) {
  const json& betas = object.at(key);
  const auto valid = [](const json& b) {
    return b.is_number() && b.get<double>() >= 0 && b.get<double>() < 1;
  };
  if (!betas.is_array() || betas.size() != 2 || !std::ranges::all_of(betas, valid))
    object.fail_at(key, concat("expected two numbers from 0 to below 1, found ", to_display(betas)));
  return betas;
}

json checked_per_group(const JsonObject& object, const std::string& key, const ValueForm& f) {
  const json& values = object.at(key);
  if (!values.is_array()) return object.number(key, 0, f.min, f.max);
  const auto valid = [&](const json& v) {
    return v.is_number() && v.get<double>() >= f.min && v.get<double>() <= f.max;
  };
  if (values.empty() || !std::ranges::all_of(values, valid))
    object.fail_at(key,
                   concat("expected a number, or one for each parameter group, found ", to_display(values)));
  return values;
}

json checked_integers(const JsonObject& object, const std::string& key) {
  const json& values = object.at(key);
  if (!values.is_array() || !std::ranges::all_of(values, [](const json& v) { return v.is_number_integer(); }))
    object.fail_at(key, concat("expected a list of whole numbers, found ", to_display(values)));
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

bool is_infinity(const json& value) {
  if (!value.is_string()) return false;
  const std::string word = lower_case(value.get<std::string>());
  return word == "inf" || word == "infinity";
}

/// The value, or the elements of a list, without quotes where the key is a number, or true or false.
json in_form_of(const ValueForm& f, const json& value) {
  const auto number = [](const json& v) {
    return v.is_string() ? as_number(v.get<std::string>()).value_or(v) : v;
  };
  switch (f.kind) {
    case ValueKind::boolean:
      if (value.is_string())
        if (const auto word = truth_of(value.get<std::string>())) return *word;
      return value.is_number() && (value == 0 || value == 1) ? json(value == 1) : value;
    case ValueKind::integer:
      if (f.infinite && is_infinity(value)) return static_cast<std::int64_t>(f.max);
      return number(value);
    case ValueKind::number:
    case ValueKind::betas:
    case ValueKind::per_group:
    case ValueKind::integers: {
      if (!value.is_array()) return number(value);
      json all = json::array();
      for (const json& v : value) all.push_back(number(v));
      return all;
    }
    default:
      return value;
  }
}

json checked(const JsonObject& object, const std::string& key, const ValueForm& f) {
  const json& value = object.at(key);
  switch (f.kind) {
    case ValueKind::boolean:
      return object.boolean(key, false);
    case ValueKind::integer:
      return object.integer(key, 0, static_cast<std::int64_t>(f.min),
                            f.max < 9.2e18 ? static_cast<std::int64_t>(f.max) : INT64_MAX);
    case ValueKind::number:
      return object.number(key, 0, f.min, f.max);
    case ValueKind::text:
      return object.text(key, "");
    case ValueKind::choice:
      return checked_choice(object, key, f);
    case ValueKind::dtype:
      return checked_dtype(object, key);
    case ValueKind::betas:
      return checked_betas(object, key);
    case ValueKind::per_group:
      return checked_per_group(object, key, f);
    case ValueKind::integers:
      return checked_integers(object, key);
    case ValueKind::object:
    case ValueKind::any:
      return value;
  }
  return value;
}

}  // namespace

const ForeignKeys* find_keys(std::span<const ForeignKeys> table, std::string_view name) {
  const auto found = std::ranges::find_if(
      table, [&](const ForeignKeys& row) { return std::ranges::count(words_of(row.names), name) > 0; });
  return found == table.end() ? nullptr : &*found;
}

bool is_off(const json& value) {
  if (value.is_array()) return std::ranges::all_of(value, is_off);
  return value == false || value.empty();
}

bool is_listed(const json& value, const char* list) {
  const json all = json::parse(list);
  return std::ranges::count(all, value) > 0 || std::ranges::count(all, without_quotes(value)) > 0;
}

bool is_accepted(const ForeignKeys* row, const json& value) {
  if (row && row->treatment != Treatment::refused) return true;
  return is_off(value) || (row && is_listed(value, row->harmless));
}

void refuse_keys(const JsonObject& object, std::span<const ForeignKeys> table) {
  for (const std::string& key : object.keys())
    if (const ForeignKeys* const row = find_keys(table, key); row && !is_accepted(row, object.at(key)))
      object.fail_at(key, std::string(row->note));
}

json checked_value(const json& value, const ValueForm& form, const std::string& key, const std::string& file,
                   const std::string& path) {
  const json holder{{key, in_form_of(form, value)}};
  return checked(JsonObject(holder, file, path), key, form);
}

json without_quotes(const json& value) {
  if (!value.is_string()) return value;
  const auto text = value.get<std::string>();
  if (auto number = as_number(text)) return *number;
  const auto word = truth_of(text);
  return word ? json(*word) : value;
}

std::optional<bool> truth_of(std::string_view text) {
  const std::string word = lower_case(std::string(text));
  for (const char* yes : {"true", "t", "yes", "y", "on", "1"})
    if (word == yes) return true;
  for (const char* no : {"false", "f", "no", "n", "off", "0"})
    if (word == no) return false;
  return std::nullopt;
}

std::string lower_case(std::string text) {
  std::ranges::transform(text, text.begin(), [](unsigned char c) { return std::tolower(c); });
  return text;
}

}  // namespace rz
