#include "sharding/tokenizer/normalizer.h"

#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <memory>
#include <new>
#include <nlohmann/json.hpp>

#include "comm/core/error.h"
#include "sharding/tokenizer/characters.h"
#include "sharding/tokenizer/elements.h"
#include "sharding/tokenizer/unicode.h"

namespace rz {
namespace {

/// By utf8proc's options, of the version of Unicode that it has.
std::string form_of_library(std::string_view text, utf8proc_option_t options) {
  utf8proc_uint8_t* mapped = nullptr;
  const auto length = utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                                   static_cast<utf8proc_ssize_t>(text.size()), &mapped, options);
  const std::unique_ptr<utf8proc_uint8_t, void (*)(void*)> owner(mapped, std::free);
  if (length == UTF8PROC_ERROR_NOMEM) throw std::bad_alloc();
  require(length >= 0, Errc::config, "a text cannot be normalized: ", utf8proc_errmsg(length));
  return std::string(reinterpret_cast<const char*>(mapped), static_cast<std::size_t>(length));
}

/// A normal form of Unicode 9: characters that it lacks stay, and what is beside them does not pass or join
/// them. What it has, later versions do not change.
std::string normal_form(const std::string& text, utf8proc_option_t options) {
  if (std::ranges::all_of(text, [](char c) { return static_cast<unsigned char>(c) < 0x80; })) return text;
  const std::vector<CharacterRange>& known = ranges_of("9_ASSIGNED");
  std::string out;
  std::size_t from = 0;
  for (std::size_t at = 0; at < text.size();) {
    const auto [code, length] = first_character(text.data() + at);
    const auto range = std::ranges::lower_bound(known, code, {}, &CharacterRange::last);
    if (range == known.end() || code < range->first) {
      out += form_of_library(std::string_view(text).substr(from, at - from), options);
      out.append(text, at, length);
      from = at + length;
    }
    at += length;
  }
  return out + form_of_library(std::string_view(text).substr(from), options);
}

/// Capital letters of Unicode 17 that utf8proc may lack, with the distance to the small ones.
struct NewCapitals {
  CharacterRange range;
  int distance;
};
constexpr std::array new_capitals{
    NewCapitals{{0x1C89, 0x1C89}, 1},      NewCapitals{{0xA7CB, 0xA7CB}, 0x264 - 0xA7CB},
    NewCapitals{{0xA7CC, 0xA7CC}, 1},      NewCapitals{{0xA7CE, 0xA7CE}, 1},
    NewCapitals{{0xA7D2, 0xA7D2}, 1},      NewCapitals{{0xA7D4, 0xA7D4}, 1},
    NewCapitals{{0xA7DA, 0xA7DA}, 1},      NewCapitals{{0xA7DC, 0xA7DC}, 0x19B - 0xA7DC},
    NewCapitals{{0x10D50, 0x10D65}, 0x20}, NewCapitals{{0x16EA0, 0x16EB8}, 0x1B}};

char32_t small_of(char32_t code) {
  for (const auto& [range, distance] : new_capitals)
    if (code >= range.first && code <= range.last)
      return static_cast<char32_t>(static_cast<int>(code) + distance);
  return static_cast<char32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(code)));
}

std::string lowercase(const std::string& text) {
  std::string out;
  for (std::size_t at = 0; at < text.size();) {
    const auto [code, length] = first_character(text.data() + at);
    if (code == 0x130)
      out += "i\xCC\x87";  // the one character whose lower case is two
    else
      append_character(out, code < 0x80 && (code < 'A' || code > 'Z') ? code : small_of(code));
    at += length;
  }
  return out;
}

std::string strip_spaces(std::string_view text, bool left, bool right) {
  const auto is_space = [sets = character_sets()](char32_t code) {
    return (sets[code] & CharacterSet::space) != 0;
  };
  while (left && !text.empty()) {
    const auto [code, length] = first_character(text.data());
    if (!is_space(code)) break;
    text.remove_prefix(length);
  }
  while (right && !text.empty()) {
    const std::size_t last = last_character(text);
    if (!is_space(first_character(text.data() + last).code)) break;
    text = text.substr(0, last);
  }
  return std::string(text);
}

std::string without_marks(const std::string& text) {
  std::string out;
  for (std::size_t at = 0; at < text.size();) {
    const auto [code, length] = first_character(text.data() + at);
    if (!(character_sets()[code] & CharacterSet::mark)) out.append(text, at, length);
    at += length;
  }
  return out;
}

}  // namespace

Normalizer Normalizer::read(const JsonObject& owner, std::string_view key) {
  Normalizer normalizer;
  if (owner.has(key) && !owner.at(key).is_null()) normalizer.read_stage(owner.object(key));
  return normalizer;
}

Normalizer Normalizer::nfc() {
  Normalizer normalizer;
  normalizer.stages_.push_back({Kind::nfc});
  return normalizer;
}

void Normalizer::read_stage(const JsonObject& stage) {
  const std::string type = required_text(stage, "type");
  if (type == "Sequence")
    return each_object(stage, "normalizers", [&](const JsonObject& s) { read_stage(s); });
  struct Plain {
    std::string_view type;
    Kind kind;
  };
  constexpr std::array plain{Plain{"NFC", Kind::nfc},
                             Plain{"NFD", Kind::nfd},
                             Plain{"NFKC", Kind::nfkc},
                             Plain{"NFKD", Kind::nfkd},
                             Plain{"Lowercase", Kind::lowercase},
                             Plain{"StripAccents", Kind::strip_accents},
                             Plain{"ByteLevel", Kind::byte_level}};
  if (const auto found = std::ranges::find(plain, type, &Plain::type); found != plain.end()) {
    stages_.push_back({found->kind});
  } else if (type == "Strip") {
    stages_.push_back({Kind::strip, stage.boolean("strip_left", true), stage.boolean("strip_right", true)});
  } else if (type == "Prepend") {
    stages_.push_back({.kind = Kind::prepend, .content = required_text(stage, "prepend")});
  } else if (type == "Replace") {
    stages_.push_back(
        {.kind = Kind::replace, .content = required_text(stage, "content"), .pattern = Pattern::read(stage)});
  } else {
    stage.fail_at("type", type + " is no normalizer that is supported");
  }
}

std::string Normalizer::apply(const Stage& stage, std::string text) {
  constexpr int stable = UTF8PROC_STABLE, compatible = UTF8PROC_STABLE | UTF8PROC_COMPAT;
  const auto form = [&](int options) { return normal_form(text, static_cast<utf8proc_option_t>(options)); };
  switch (stage.kind) {
    case Kind::nfc:
      return form(stable | UTF8PROC_COMPOSE);
    case Kind::nfd:
      return form(stable | UTF8PROC_DECOMPOSE);
    case Kind::nfkc:
      return form(compatible | UTF8PROC_COMPOSE);
    case Kind::nfkd:
      return form(compatible | UTF8PROC_DECOMPOSE);
    case Kind::lowercase:
      return lowercase(text);
    case Kind::strip:
      return strip_spaces(text, stage.left, stage.right);
    case Kind::strip_accents:
      return without_marks(text);
    case Kind::prepend:
      return text.empty() ? text : stage.content + text;
    case Kind::replace:
      return stage.pattern.replaced(text, stage.content);
    case Kind::byte_level:
      return characters_of_bytes(text);
  }
  return text;
}

std::string Normalizer::normalized(std::string text) const {
  for (const Stage& stage : stages_) text = apply(stage, std::move(text));
  return text;
}

}  // namespace rz
