#pragma once
/// Values that the config.json of every family has.

#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "comm/core/text.h"
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

/// The tokens of a key that has one, a list, or null: those that the vocabulary has.
inline std::vector<std::size_t> special_tokens(const JsonObject& o, const char* key, std::size_t vocabulary,
                                               std::int64_t absent = -1) {
  const nlohmann::json given = o.has(key) ? o.at(key) : nlohmann::json(absent);
  std::vector<std::size_t> tokens;
  for (const nlohmann::json& token : given.is_array() ? given : nlohmann::json::array({given})) {
    if (!token.is_number_integer() && !given.is_null())
      o.fail_at(key, concat("must be a token, a list of tokens, or null, found ", to_display(given)));
    const std::int64_t id = token.is_null() ? -1 : token.get<std::int64_t>();
    if (id >= 0 && static_cast<std::size_t>(id) < vocabulary) tokens.push_back(static_cast<std::size_t>(id));
  }
  return tokens;
}

/// The same of a key that has no list; a list is none.
inline std::optional<std::size_t> special_token(const JsonObject& o, const char* key, std::size_t vocabulary,
                                                std::int64_t absent = -1) {
  if (o.has(key) && o.at(key).is_array()) return std::nullopt;
  const auto tokens = special_tokens(o, key, vocabulary, absent);
  return tokens.empty() ? std::nullopt : std::optional(tokens[0]);
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

/// The one of two names of a value that is given, or the first. Errc::config for two values that differ.
const char* spelling(const JsonObject&, const char* name, const char* other);

/// layer_types, if it is given, states for each layer what other keys state for all; Errc::config if it
/// differs. `is_sliding`: layers with a window of keys.
void check_layer_types(const JsonObject&, const std::vector<bool>& is_sliding);

/// Errc::config for what makes another model of each family: quantized weights, attention in both directions,
/// heads that are left out, and the configuration of a model within another one.
void refuse_other_models(const JsonObject&);

}  // namespace rz
