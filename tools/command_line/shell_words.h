#pragma once
/// Words as a shell has them.

#include <string>
#include <string_view>
#include <vector>

namespace rz {

/// The words between blanks. Quotes ('…', "…") and a backslash keep blanks in a word, as in a shell; nothing
/// is expanded. Errc::config, with `flag`, if a quote has no other one.
std::vector<std::string> shell_words(std::string_view text, std::string_view flag);

/// A shell reads it as this one word.
std::string quoted_for_shell(std::string_view word);

}  // namespace rz
