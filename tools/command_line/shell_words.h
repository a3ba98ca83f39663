#pragma once
/// Words of a text that is the value of a flag.

#include <string>
#include <string_view>
#include <vector>

namespace rz {

/// The words between blanks. Quotes ('…', "…") and a backslash keep blanks in a word, as in a shell; nothing
/// is expanded. Errc::config, with `flag`, if a quote has no other one.
std::vector<std::string> shell_words(std::string_view text, std::string_view flag);

}  // namespace rz
