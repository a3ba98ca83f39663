#pragma once
/// Flags shared by the bench programs.

#include <string>

#include "tools/command_line/command_line.h"

namespace rz::bench {

/// --timeout of an operation; 0, the default: the timeout of the library.
void add_timeout(CommandLine&, double& seconds);
/// -R, the kind of memory. `why` is printed after the default.
void add_memory(CommandLine&, int& registered, const std::string& why = "");

}  // namespace rz::bench
