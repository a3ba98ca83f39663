#pragma once
/// How much of a sample is words of the text that the model was trained on.

#include <cstddef>
#include <string>
#include <string_view>

namespace rz::train_gpt {

struct KnownWords {
  std::size_t all = 0;    ///< words of the sample
  std::size_t known = 0;  ///< those that are words of the data
};

/// A word is a run of ASCII letters that no letter precedes or follows; upper and lower case differ. The
/// sample's first word begins in the prompt if that ends with a letter. A word at the end of the sample,
/// which may go on, does not count. Data without text: no words at all.
KnownWords known_words(std::string_view prompt, std::string_view sample, std::string_view data);

/// "words: 41 of 43 occur in the data (95%)"
std::string describe(const KnownWords&);

}  // namespace rz::train_gpt
