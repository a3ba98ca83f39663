#pragma once
/// Values that the config.json of every family has.

#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "sharding/io/json.h"
#include "tensor/attention_ops.h"

namespace rz {

/// A required size of 1 to `max_value`.
inline std::size_t size_at(const JsonObject& o, const char* key, std::int64_t max_value) {
  return static_cast<std::size_t>(o.required_integer(key, 1, max_value));
}

/// Neither absent nor null.
inline bool is_given(const JsonObject& o, const char* key) { return o.has(key) && !o.at(key).is_null(); }

/// A size of 1 to `max_value` if the key is given.
inline std::size_t size_at(const JsonObject& o, const char* key, std::int64_t absent,
                           std::int64_t max_value) {
  return static_cast<std::size_t>(is_given(o, key) ? o.integer(key, absent, 1, max_value) : absent);
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

constexpr std::int64_t max_positions = std::int64_t{1} << 30;  ///< of max_position_embeddings
constexpr double max_theta = 1e15;                             ///< of rope_theta

/// Rotary position embedding.
struct RopeConfig {
  ops::RotaryOptions options{};
  double partial_rotary_factor = 1;  ///< the share of a head's channels that is rotated
};
/// A key of config.json beside the object, and its value if nothing states one.
struct RopeKey {
  const char* name;
  double absent;
};
/// rope_scaling, if it is given and not empty, else rope_parameters, with the keys rope_theta and
/// partial_rotary_factor; what it lacks of these is that of `theta` and `partial`. Errc::config for two
/// statements that differ. Beside rope_scaling, rope_parameters may be of type "default".
RopeConfig rope_of(const JsonObject&, std::size_t positions, const RopeKey& theta, const RopeKey& partial);
/// rope_scaling.
nlohmann::ordered_json scaling_json(const ops::RotaryOptions&);

/// Of two names of one value, the one that is given, or the first. Errc::config for two values that differ.
const char* spelling(const JsonObject&, const char* name, const char* other);

/// layer_types, if it is given, states for each layer what other keys state for all; Errc::config if it
/// differs. `is_sliding`: layers with a window of keys.
void check_layer_types(const JsonObject&, const std::vector<bool>& is_sliding);

/// Errc::config for what makes another model of each family: quantized weights, attention in both directions,
/// heads that are left out, and the configuration of a model within another one.
void refuse_other_models(const JsonObject&);

}  // namespace rz
