#pragma once
/// A call that may hang in somebody else's code, with a limit.

#include <chrono>
#include <functional>

namespace rz::nccl {

/// Runs `f` in a thread of its own; true once it has returned. False: it had not by the limit, and goes on
/// alone, so it must own all that it touches. `f` must not throw.
bool run_with_timeout(std::chrono::milliseconds limit, std::function<void()> f);

}  // namespace rz::nccl
