#pragma once
/// Values that the config.json of every family has.

#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "sharding/io/json.h"

namespace rz {

/// A required size of 1 to `max_value`.
inline std::size_t size_at(const JsonObject& o, const char* key, std::int64_t max_value) {
  return static_cast<std::size_t>(o.required_integer(key, 1, max_value));
}

/// A token of the tokenizer. None for null, a list, and a token that the vocabulary lacks.
inline std::optional<std::size_t> special_token(const JsonObject& o, const char* key, std::size_t vocabulary,
                                                std::int64_t absent = -1) {
  if (o.has(key) && !o.at(key).is_number()) return std::nullopt;
  const std::int64_t token = o.integer(key, absent, INT64_MIN, INT64_MAX);
  if (token < 0 || static_cast<std::size_t>(token) >= vocabulary) return std::nullopt;
  return static_cast<std::size_t>(token);
}

/// The same for a key that may have a list: those tokens that the vocabulary has.
inline std::vector<std::size_t> special_tokens(const JsonObject& o, const char* key, std::size_t vocabulary,
                                               std::int64_t absent = -1) {
  std::vector<std::size_t> tokens;
  if (!o.has(key) || !o.at(key).is_array()) {
    if (const auto token = special_token(o, key, vocabulary, absent)) tokens.push_back(*token);
    return tokens;
  }
  for (const nlohmann::json& token : o.at(key))
    if (token.is_number_unsigned() && token.get<std::size_t>() < vocabulary) tokens.push_back(token);
  return tokens;
}

inline nlohmann::ordered_json token_or_null(const std::optional<std::size_t>& token) {
  return token ? nlohmann::ordered_json(*token) : nlohmann::ordered_json();
}
/// Null, a token, or a list.
inline nlohmann::ordered_json tokens_or_null(const std::vector<std::size_t>& tokens) {
  if (tokens.empty()) return nullptr;
  return tokens.size() == 1 ? nlohmann::ordered_json(tokens[0]) : nlohmann::ordered_json(tokens);
}

}  // namespace rz
