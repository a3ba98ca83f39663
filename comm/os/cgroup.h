#pragma once
/// Limits of Linux control groups (versions 1 and 2) for this process: the tightest of its cgroup and its
/// ancestors. `root` is prepended to /proc and /sys, for tests.

#include <optional>
#include <string>

namespace rz {

/// CPU quota, in CPUs; may be fractional. nullopt: no limit.
std::optional<double> cgroup_processors(const std::string& root = "");

/// Bytes of memory that this process can still allocate: the smallest limit minus usage. File pages and
/// reclaimable slab do not count as usage, since the kernel reclaims them; shared memory does. nullopt: no
/// limit.
std::optional<unsigned long long> cgroup_memory(const std::string& root = "");

/// Processes and threads that may still start in this process's cgroups: the smallest limit minus those that
/// exist. nullopt: no limit.
std::optional<unsigned long long> cgroup_processes(const std::string& root = "");

}  // namespace rz
