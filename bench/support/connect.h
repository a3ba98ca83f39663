#pragma once
/// Connects the ranks of a program in which each process is one rank.

#include "comm/communicator.h"

namespace rz::bench {

/// Connects the ranks described by the environment of the launcher; without a launcher, a group of one rank.
/// `timeout_s` limits each operation; 0: the default of the library.
Communicator connect_group(double timeout_s);

}  // namespace rz::bench
