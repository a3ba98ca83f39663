#pragma once
/// Properties of characters by the names that regular expressions have for them, of Unicode 16.0: the version
/// of Hugging Face's tokenizers 0.23, whatever Unicode a library on this machine has.

#include <string_view>
#include <vector>

namespace rz {

struct CharacterRange {
  char32_t first, last;
};

/// The characters, in order, of a property in \p{…}: general categories, scripts, properties that are true or
/// false, and classes of POSIX. Case, blanks, hyphens and underscores of the name do not count. nullptr: the
/// table lacks it.
const std::vector<CharacterRange>* find_property(std::string_view name);
/// The same of another version of Unicode, where a part of tokenizers has one: "9_M", marks of 9.0, "8_P",
/// punctuation of 8.0, "17_N", numbers of 17.0, and "9_ASSIGNED". The name must be one of these, or one of
/// \p{…} as the table spells it.
const std::vector<CharacterRange>& ranges_of(std::string_view name);

}  // namespace rz
