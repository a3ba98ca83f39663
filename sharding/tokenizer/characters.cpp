#include "sharding/tokenizer/characters.h"

#include <memory>

#include "comm/core/lazy.h"
#include "sharding/io/text.h"
#include "sharding/tokenizer/unicode.h"

namespace rz {
namespace {

using Sets = std::array<std::uint8_t, 0x110000>;

std::unique_ptr<const Sets> make_sets() {
  auto sets = std::make_unique<Sets>();
  const auto add = [&](const char* name, std::uint8_t set) {
    for (const auto& [first, last] : ranges_of(name))
      for (char32_t c = first; c <= last; ++c) (*sets)[c] |= set;
  };
  add("L", CharacterSet::alpha);
  add("N", CharacterSet::number);
  add("17_N", CharacterSet::numeric);
  add("SPACE", CharacterSet::space);
  add("9_M", CharacterSet::mark);
  add("8_P", CharacterSet::punctuation);
  add("WORD", CharacterSet::word);
  add("JOINC", CharacterSet::word);
  for (const char c : std::string_view("$+<=>^`|~"))
    (*sets)[static_cast<std::size_t>(c)] |= CharacterSet::punctuation;
  return sets;
}

/// How a text begins: with a character, with bytes that are none, or with the beginning of one, at the end.
struct Beginning {
  std::size_t length;
  bool valid, cut;
};

Beginning beginning_of(std::string_view text) {
  if (const std::size_t length = utf8_length(text)) return {length, true, false};
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned first = byte(0);
  const std::size_t whole = first >= 0xC2 && first < 0xE0   ? 2
                            : first >= 0xE0 && first < 0xF0 ? 3
                            : first >= 0xF0 && first < 0xF5 ? 4
                                                            : 1;
  unsigned low = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
  unsigned high = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
  std::size_t length = 1;
  for (; length < whole && length < text.size() && byte(length) >= low && byte(length) <= high; ++length)
    low = 0x80, high = 0xBF;
  return {length, false, length < whole && length == text.size()};
}

}  // namespace

const std::uint8_t* character_sets() {
  static constinit Lazy<std::unique_ptr<const Sets>> sets;
  return sets.get(make_sets)->data();
}

bool is_one_character(std::string_view text) { return !text.empty() && utf8_length(text) == text.size(); }

void append_character(std::string& out, char32_t code) {
  const auto low = [&](int shift) { return static_cast<char>(0x80 | (code >> shift & 0x3F)); };
  if (code < 0x80) {
    out += static_cast<char>(code);
  } else if (code < 0x800) {
    out += {static_cast<char>(0xC0 | code >> 6), low(0)};
  } else if (code < 0x10000) {
    out += {static_cast<char>(0xE0 | code >> 12), low(6), low(0)};
  } else {
    out += {static_cast<char>(0xF0 | code >> 18), low(12), low(6), low(0)};
  }
}

void take_characters(std::string& text, std::string& out) {
  std::size_t at = 0;
  while (at < text.size()) {
    const auto [length, valid, cut] = beginning_of(std::string_view(text).substr(at));
    if (cut) break;
    if (valid)
      out.append(text, at, length);
    else
      out += replacement_character;
    at += length;
  }
  text.erase(0, at);
}

std::string_view valid_utf8(std::string_view text, std::string& storage) {
  std::size_t valid = 0;
  while (valid < text.size()) {
    if (static_cast<unsigned char>(text[valid]) < 0x80) {
      ++valid;
      continue;
    }
    const std::size_t length = utf8_length(text.substr(valid));
    if (length == 0) break;
    valid += length;
  }
  if (valid == text.size()) return text;
  std::string rest(text.substr(valid));
  storage.assign(text.substr(0, valid));
  take_characters(rest, storage);
  if (!rest.empty()) storage += replacement_character;
  return storage;
}

const ByteCharacters& byte_characters() {
  static constinit Lazy<ByteCharacters> characters;
  return characters.get([] {
    ByteCharacters all;
    all.byte_of.fill(-1);
    char32_t next = 256;
    for (int byte = 0; byte < 256; ++byte) {
      const bool printable = (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
      const char32_t code = printable ? static_cast<char32_t>(byte) : next++;
      append_character(all.of_byte[static_cast<std::size_t>(byte)], code);
      all.byte_of[code] = static_cast<std::int16_t>(byte);
    }
    return all;
  });
}

std::string characters_of_bytes(std::string_view bytes) {
  std::string out;
  for (const char byte : bytes) out += byte_characters().of_byte[static_cast<unsigned char>(byte)];
  return out;
}

bool bytes_of_characters(std::string_view token, std::string& bytes) {
  const ByteCharacters& all = byte_characters();
  bytes.clear();
  for (std::size_t at = 0; at < token.size();) {
    const auto [code, length] = first_character(token.data() + at);
    if (code >= all.byte_of.size() || all.byte_of[code] < 0) return false;
    bytes += static_cast<char>(all.byte_of[code]);
    at += length;
  }
  return true;
}

}  // namespace rz
