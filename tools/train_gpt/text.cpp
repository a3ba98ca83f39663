#include "tools/train_gpt/text.h"

namespace rz::train_gpt {
namespace {

/// Bytes of the UTF-8 character at the front; 0 if it is none. Overlong forms and surrogates are refused.
std::size_t utf8_length(std::string_view s) {
  const auto byte = [&](std::size_t i) { return i < s.size() ? static_cast<unsigned char>(s[i]) : 0u; };
  const auto follows = [&](std::size_t i) { return (byte(i) & 0xc0) == 0x80; };
  const unsigned first = byte(0);
  if (first >= 0xc2 && first <= 0xdf) return follows(1) ? 2 : 0;
  if (first >= 0xe0 && first <= 0xef) {
    const unsigned low = first == 0xe0 ? 0xa0 : 0x80, high = first == 0xed ? 0x9f : 0xbf;
    return byte(1) >= low && byte(1) <= high && follows(2) ? 3 : 0;
  }
  if (first >= 0xf0 && first <= 0xf4) {
    const unsigned low = first == 0xf0 ? 0x90 : 0x80, high = first == 0xf4 ? 0x8f : 0xbf;
    return byte(1) >= low && byte(1) <= high && follows(2) && follows(3) ? 4 : 0;
  }
  return 0;
}

}  // namespace

std::string printable(std::string_view bytes) {
  std::string out;
  while (!bytes.empty()) {
    const auto c = static_cast<unsigned char>(bytes[0]);
    const bool plain = (c >= 0x20 && c < 0x7f) || c == '\n' || c == '\t';
    // C1 controls (U+0080 to U+009F) are two bytes that terminals obey.
    const bool control = c == 0xc2 && bytes.size() > 1 && static_cast<unsigned char>(bytes[1]) < 0xa0;
    const std::size_t length = plain ? 1 : control ? 0 : utf8_length(bytes);
    out += length ? bytes.substr(0, length) : "·";
    bytes.remove_prefix(length ? length : 1);
  }
  return out;
}

}  // namespace rz::train_gpt
