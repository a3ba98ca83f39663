#include "sharding/io/text.h"

#include <algorithm>

namespace rz {
namespace {

void append_hex(std::string& out, unsigned char byte) {
  constexpr char digits[] = "0123456789abcdef";
  out += "\\x";
  out += digits[byte >> 4];
  out += digits[byte & 15];
}

/// C1 controls (U+0080 to U+009F) are two bytes in UTF-8, and terminals interpret them.
bool is_control(std::string_view character) {
  const auto first = static_cast<unsigned char>(character[0]);
  if (character.size() == 1) return first < 0x20 || first == 0x7f;
  return first == 0xc2 && static_cast<unsigned char>(character[1]) < 0xa0;
}

}  // namespace

bool is_utf8(std::string_view text) {
  while (!text.empty()) {
    const std::size_t length = utf8_length(text);
    if (length == 0) return false;
    text.remove_prefix(length);
  }
  return true;
}

std::string escaped(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    const std::size_t found = utf8_length(text), length = found ? found : 1;
    const std::string_view character = text.substr(0, length);
    if (found && !is_control(character))
      out += character;
    else
      for (const char c : character) append_hex(out, static_cast<unsigned char>(c));
    text.remove_prefix(length);
  }
  return out;
}

std::string listed(std::span<const std::string> names) {
  constexpr std::size_t max_listed = 8;
  std::string text;
  for (std::size_t i = 0; i < std::min(names.size(), max_listed); ++i) text += (i ? ", " : "") + names[i];
  if (names.size() > max_listed) text += concat(" and ", names.size() - max_listed, " more");
  return text;
}

}  // namespace rz
