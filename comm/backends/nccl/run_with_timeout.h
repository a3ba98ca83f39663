#pragma once
/// Calls into foreign code that may hang, with a limit.

#include <chrono>
#include <functional>

namespace rz::nccl {

/// Runs `f` in a new thread and returns true once it has returned. False if it has not within `limit`: it
/// then continues in the background, so `f` must own everything it accesses. `f` must not throw.
bool run_with_timeout(std::chrono::milliseconds limit, std::function<void()> f);

}  // namespace rz::nccl
