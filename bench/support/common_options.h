#pragma once
/// Flags that the benches share.

#include <string>

#include "tools/command_line/command_line.h"

namespace rz::bench {

/// --timeout of an operation; 0, the default: the library's own.
void add_timeout(CommandLine&, double& seconds);
/// -R, the kind of memory. `why`: after the default.
void add_memory(CommandLine&, int& registered, const std::string& why = "");

}  // namespace rz::bench
