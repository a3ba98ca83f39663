#pragma once
/// The parent of the process that runs the ranks. Each of both ends all processes of the ranks if the other
/// is killed, which a signal at a parent's end cannot do: that reaches a rank, but no process that it
/// started.

#include <signal.h>

#include <functional>

#include "comm/os/fd.h"

namespace rz::rzrun {

/// Runs `work` in a child and returns its result, in both processes; 128 + signal if one killed the child.
/// Signals to the keeper go to the child. Call it once, from a single-threaded process.
int run_kept(const std::function<int()>& work);

/// The signal of a process whose keeper was killed: all processes of the ranks end at once.
inline constexpr int keeper_lost = SIGPWR;

/// Stops this process, as the default of SIGTSTP, which is blocked. Returns when it goes on.
void stop_as_by_terminal();

/// Blocks the signals that rzrun and its agents handle, and returns the signalfd that reads them. SIGPIPE is
/// ignored.
UniqueFd block_signals();

}  // namespace rz::rzrun
