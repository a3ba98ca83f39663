#include "sharding/lm/sample_text.h"

#include <unordered_set>
#include <vector>

#include "comm/core/text.h"
#include "sharding/io/text.h"

namespace rz::lm {
namespace {

bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

template <class F>
void for_each_word(std::string_view text, const F& use) {
  for (std::size_t at = 0; at < text.size();) {
    std::size_t end = at;
    while (end < text.size() && is_letter(text[end])) ++end;
    if (end > at) use(text.substr(at, end - at));
    at = end + 1;
  }
}

/// The sample, with the part of the prompt that its first word continues, and without a last word cut off.
std::string whole_words(std::string_view prompt, std::string_view sample) {
  std::size_t begin = prompt.size();
  while (begin > 0 && is_letter(prompt[begin - 1])) --begin;
  std::string text(prompt.substr(begin));
  text += sample;
  while (!text.empty() && is_letter(text.back())) text.pop_back();
  return text;
}

}  // namespace

std::string printable(std::string_view bytes) {
  std::string out;
  while (!bytes.empty()) {
    const auto c = static_cast<unsigned char>(bytes[0]);
    const bool line = c == '\n' || c == '\t';
    const std::size_t length = utf8_length(bytes);
    const std::string_view character = bytes.substr(0, length);
    const bool fit = line || (length > 0 && escaped(character) == character);
    out += fit ? character : "·";
    bytes.remove_prefix(fit ? length : 1);
  }
  return out;
}

KnownWords known_words(std::string_view prompt, std::string_view sample, std::string_view data) {
  if (data.empty()) return {};
  const std::string text = whole_words(prompt, sample);
  std::vector<std::string_view> words;
  for_each_word(text, [&](std::string_view word) { words.push_back(word); });
  std::unordered_set<std::string_view> unknown(words.begin(), words.end());
  for_each_word(data, [&](std::string_view word) { unknown.erase(word); });
  KnownWords counted{.all = words.size()};
  for (const auto word : words) counted.known += !unknown.contains(word);
  return counted;
}

std::string describe(const KnownWords& w) {
  return concat("words: ", w.known, " of ", w.all, " occur in the data (", w.all ? 100 * w.known / w.all : 0,
                "%)");
}

}  // namespace rz::lm
