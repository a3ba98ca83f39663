#pragma once
/// Values that the config.json of every family has.

#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>

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

inline nlohmann::ordered_json token_or_null(const std::optional<std::size_t>& token) {
  return token ? nlohmann::ordered_json(*token) : nlohmann::ordered_json();
}

}  // namespace rz
