#pragma once
/// The parent of the process that runs the ranks. Each of both ends all processes of the ranks if the other
/// is killed, which a signal at a parent's end cannot do: that reaches a rank, but no process that it
/// started.

#include <functional>

namespace rz::rzrun {

/// Runs `work` in a child and returns its result, in both processes; 128 + signal if one killed the child.
/// Signals to the keeper go to the child. Call it once, from a single-threaded process.
int run_kept(const std::function<int()>& work);

}  // namespace rz::rzrun
