#pragma once
/// Reading of the parts of a tokenizer.json.

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "sharding/io/json.h"
#include "sharding/tokenizer/characters.h"

namespace rz {

/// Calls f(element) for the objects of an array. Errc::config names one that is none.
template <class F>
void each_object(const JsonObject& owner, std::string_view key, const F& f) {
  if (!owner.has(key) || !owner.at(key).is_array()) owner.fail_at(key, "expected an array [ … ]");
  const nlohmann::json& all = owner.at(key);
  for (std::size_t i = 0; i < all.size(); ++i)
    f(JsonObject(all[i], owner.file(), owner.path(key) + "[" + std::to_string(i) + "]"));
}

/// The text of a key. Errc::config without it.
inline std::string required_text(const JsonObject& owner, std::string_view key) {
  if (!owner.has(key)) owner.fail_at(key, "missing; give a text in quotes");
  return owner.text(key, "");
}

/// The text of a key that is one character.
inline std::string required_character(const JsonObject& owner, std::string_view key) {
  std::string text = required_text(owner, key);
  if (!is_one_character(text)) owner.fail_at(key, "expected one character");
  return text;
}

/// How a Metaspace of a tokenizer.json marks the beginning of a text.
enum class PrependScheme { never, first, always };
inline PrependScheme prepend_scheme(const JsonObject& owner) {
  const std::string name = owner.text("prepend_scheme", "always");
  if (name != "never" && name != "first" && name != "always")
    owner.fail_at("prepend_scheme", "expected never, first or always, found " + name);
  const bool has_legacy = owner.has("add_prefix_space") && !owner.at("add_prefix_space").is_null();
  if (has_legacy && !owner.boolean("add_prefix_space", true)) {
    if (owner.has("prepend_scheme") && name != "never")
      owner.fail_at("add_prefix_space", "false, with another prepend_scheme than never");
    return PrependScheme::never;
  }
  return name == "never"   ? PrependScheme::never
         : name == "first" ? PrependScheme::first
                           : PrependScheme::always;
}

}  // namespace rz
