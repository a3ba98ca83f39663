#pragma once
/// The group of a program whose process is one rank.

#include "comm/communicator.h"

namespace rz::bench {

/// What the launcher's environment says, alone without one. `timeout_s`: of an operation; 0: the library's
/// own.
Communicator join_group(double timeout_s);

}  // namespace rz::bench
