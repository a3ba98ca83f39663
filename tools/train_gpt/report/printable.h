#pragma once
/// Makes bytes of a generated text safe for a terminal.

#include <string>
#include <string_view>

namespace rz::train_gpt {

/// Keeps newlines, tabs, printable ASCII and valid UTF-8; replaces every other byte by "·".
std::string printable(std::string_view bytes);

}  // namespace rz::train_gpt
