#pragma once
/// A name of the machine that its processes agree on.

#include <string>

namespace rz {

/// The kernel's boot id, the host's name and the network namespace: ranks that agree on it can share memory.
std::string machine_id();

}  // namespace rz
