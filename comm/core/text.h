#pragma once
/// Text for error messages and reports: `concat("rank ", 3, " of ", 8)`. Numbers are read and written without
/// streams and printf, since a host program's locale would change them.

#include <algorithm>
#include <charconv>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace rz {

namespace detail {
inline void append(std::string& out, std::string_view s) { out += s; }
inline void append(std::string& out, char c) { out += c; }
inline void append_bool(std::string& out, bool b) { out += b ? "true" : "false"; }
template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>>
void append(std::string& out, T value) {
  if constexpr (std::is_same_v<T, bool>) return append_bool(out, value);
  char text[64];
  if constexpr (!std::is_same_v<T, bool>)
    out.append(text, std::to_chars(text, text + sizeof text, value).ptr);
}
}  // namespace detail

/// Joins its arguments: strings, characters, and numbers in their shortest exact form.
template <class... T>
std::string concat(const T&... parts) {
  std::string out;
  (detail::append(out, parts), ...);
  return out;
}

/// The number that the whole text is; nullopt if it is none of this type.
template <class T>
std::optional<T> parse_number(std::string_view text, int base = 10) {
  T value{};
  const char* const end = text.data() + text.size();
  const auto parsed = [&] {
    if constexpr (std::is_floating_point_v<T>)
      return std::from_chars(text.data(), end, value);
    else
      return std::from_chars(text.data(), end, value, base);
  }();
  return parsed.ec == std::errc{} && parsed.ptr == end ? std::optional(value) : std::nullopt;
}

/// The parts of a text between spaces, tabs and line ends.
std::vector<std::string_view> words_of(std::string_view);
/// The parts of a text between separators; they may be empty, and there is at least one.
std::vector<std::string> parts_of(std::string_view text, char separator);

/// Length in bytes of the UTF-8 character at the front; 0 if it is invalid. Overlong forms and surrogates are
/// invalid.
std::size_t utf8_length(std::string_view);

/// With this number of decimals, rounded to nearest: fixed(0.128, 2) is "0.13".
std::string fixed(double value, int decimals);

/// printf's "%.<digits>g" in the "C" locale.
std::string rounded(double value, int digits);

/// Bytes in binary units with at most one decimal: "512 B", "1.5 MiB".
std::string human_bytes(unsigned long long bytes);

/// Insertions, deletions, replacements and swaps of neighbours between two texts, none of which is edited
/// twice in one place (Damerau and Levenshtein).
int edit_distance(std::string_view a, std::string_view b);

/// The nearest of the names, for "did you mean" messages; empty if none is near: at most one edit for every
/// four characters of the longer of the two.
template <class Names>
std::string nearest_name(std::string_view word, const Names& names) {
  std::string best;
  int min_edits = static_cast<int>(word.size());
  for (const auto& name : names) {
    const std::string_view text = name;
    const int edits = edit_distance(word, text);
    if (4 * edits <= static_cast<int>(std::max(word.size(), text.size())) && edits < min_edits)
      min_edits = edits, best = text;
  }
  return best;
}

}  // namespace rz
