#pragma once
/// Identifier of a machine, equal in all of its processes.

#include <string>

namespace rz {

/// "<kernel boot id>/<host name>/<network namespace>". Ranks with equal ids can share memory.
std::string machine_id();

/// The kernel's boot id: equal in all processes of one kernel, different after a restart. Empty without
/// /proc.
std::string kernel_boot_id();

}  // namespace rz
