#pragma once
/// Bytes of a model, fit for a terminal.

#include <string>
#include <string_view>

namespace rz::train_gpt {

/// Line ends, tabs, printable ASCII and well-formed UTF-8 stay; every other byte becomes "·".
std::string printable(std::string_view bytes);

}  // namespace rz::train_gpt
