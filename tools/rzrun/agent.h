#pragma once
/// `rzrun --agent`: runs the ranks of one host for another rzrun.

namespace rz::rzrun {

/// Reads frames from the standard input and writes frames to the standard output, as frames.h has them. At
/// the end of its input, after 10 s without a frame, or at SIGTERM, it ends the ranks: SIGTERM, and after the
/// grace period of the job SIGKILL. Returns the exit status of the agent. Call it once, from a
/// single-threaded process.
int run_agent();

}  // namespace rz::rzrun
