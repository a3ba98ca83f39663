#pragma once
/// Flags shared by the bench programs, and the group that they describe.

#include <string>

#include "comm/communicator.h"
#include "tools/command_line/command_line.h"

namespace rz::bench {

/// --timeout of an operation; 0, the default: the timeout of the library.
void add_timeout(CommandLine&, double& seconds);
/// -R, the kind of memory. `why` is printed after the default.
void add_memory(CommandLine&, int& registered, const std::string& why = "");

/// Connects the ranks described by the environment of the launcher; without a launcher, a group of one rank.
/// `timeout_s` limits each operation; 0: the default of the library.
Communicator connect_group(double timeout_s);

}  // namespace rz::bench
