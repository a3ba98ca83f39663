#pragma once
/// Characters of Unicode in UTF-8: their categories, and the characters that GPT-2 has for bytes.

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace rz {

/// Sets of characters, of the versions of Unicode that the parts of tokenizers 0.23 have.
struct CharacterSet {
  static constexpr std::uint8_t alpha = 1;         ///< L of Unicode 16
  static constexpr std::uint8_t number = 2;        ///< N of Unicode 16
  static constexpr std::uint8_t space = 4;         ///< White_Space
  static constexpr std::uint8_t mark = 8;          ///< M of Unicode 9
  static constexpr std::uint8_t punctuation = 16;  ///< P of Unicode 8, and ASCII's of S
  static constexpr std::uint8_t word = 32;         ///< \w of UTS 18: Alphabetic, M, Nd, Pc, Join_Control
  static constexpr std::uint8_t numeric = 64;      ///< N of Unicode 17
};

/// The sets of each character, at the place of its code point.
const std::uint8_t* character_sets();

/// A character of valid UTF-8.
struct Character {
  char32_t code;
  std::size_t length;  ///< bytes
};

/// The character at the front of a text of valid UTF-8 that is not empty.
inline Character first_character(const char* text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  if (byte(0) < 0x80) return {byte(0), 1};
  const auto low = [&](std::size_t i) { return char32_t{byte(i)} & 0x3F; };
  if (byte(0) < 0xE0) return {(char32_t{byte(0)} & 0x1F) << 6 | low(1), 2};
  if (byte(0) < 0xF0) return {(char32_t{byte(0)} & 0x0F) << 12 | low(1) << 6 | low(2), 3};
  return {(char32_t{byte(0)} & 0x07) << 18 | low(1) << 12 | low(2) << 6 | low(3), 4};
}
/// The start of the last character of a text of valid UTF-8 that is not empty.
inline std::size_t last_character(std::string_view text) {
  std::size_t at = text.size() - 1;
  while (at > 0 && (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80) --at;
  return at;
}
/// Whether the text is one character.
bool is_one_character(std::string_view text);
void append_character(std::string& out, char32_t code);

/// U+FFFD.
inline constexpr std::string_view replacement_character = "\xEF\xBF\xBD";

/// Moves the text to `out`, except the beginning of a character at its end. Bytes that are not UTF-8 become
/// U+FFFD, one for each longest beginning of a character, as in Python's decode("utf-8", "replace").
void take_characters(std::string& text, std::string& out);
/// The text, or a copy in `storage` with U+FFFD in place of what is not UTF-8.
std::string_view valid_utf8(std::string_view text, std::string& storage);

/// GPT-2's printable characters of bytes: a byte's own, or one from U+0100 on for bytes that are not
/// printable.
struct ByteCharacters {
  std::array<std::string, 256> of_byte;
  std::array<std::int16_t, 0x144> byte_of;  ///< by code point; -1: of no byte
};
const ByteCharacters& byte_characters();
/// A text with each byte as its character.
std::string characters_of_bytes(std::string_view bytes);
/// The bytes of a token whose characters are those of bytes; false if another character is there.
bool bytes_of_characters(std::string_view token, std::string& bytes);

}  // namespace rz
