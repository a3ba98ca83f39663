#pragma once
/// What control groups (Linux, versions 1 and 2) leave this process: the limits of its own group and of all
/// that hold it.

#include <optional>
#include <string>

namespace rz {

/// Processors' worth of time, the smallest quota (cpu.max). None: no limit. `root`: where /proc and /sys
/// stand.
std::optional<double> cgroup_processors(const std::string& root = "");

/// Bytes that may still be taken: the smallest difference of a limit and what counts as used. Pages of files
/// and reclaimable slab do not, since the kernel gives them up; shared memory does. None: no limit.
std::optional<unsigned long long> cgroup_memory(const std::string& root = "");

}  // namespace rz
