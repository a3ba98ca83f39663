#pragma once
/// The group of ranks of a program in which each process is one rank.

#include "comm/communicator.h"

namespace rz::bench {

/// Connects the ranks that the launcher's environment describes; without a launcher, one rank alone.
/// `timeout_s` limits each operation; 0 means the library's default.
Communicator connect_group(double timeout_s);

}  // namespace rz::bench
