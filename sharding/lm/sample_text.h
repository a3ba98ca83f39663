#pragma once
/// Text of generated samples: for a terminal, and the share of its words that occur in the training text.

#include <cstddef>
#include <string>
#include <string_view>

namespace rz::lm {

/// Keeps newlines, tabs, printable ASCII and valid UTF-8; replaces every other byte by "·".
std::string printable(std::string_view bytes);

struct KnownWords {
  std::size_t all = 0;    ///< words in the sample
  std::size_t known = 0;  ///< words that occur in the data
};

/// A word is a maximal run of ASCII alphabetic characters, case-sensitive. If the prompt ends within a word,
/// the first word of the sample includes that part of the prompt. A word cut off by the end of the sample is
/// not counted. Without text data both counts are 0.
KnownWords known_words(std::string_view prompt, std::string_view sample, std::string_view data);

/// "words: 41 of 43 occur in the data (95%)"
std::string describe(const KnownWords&);

}  // namespace rz::lm
