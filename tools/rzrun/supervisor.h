#pragma once
/// Runs a job from start to end.

#include "tools/rzrun/options.h"

namespace rz::rzrun {

/// Starts the ranks, forwards their output, terminates all of them when one fails or a signal arrives, and
/// returns the exit status of rzrun. No process started by a rank survives. Diagnostics go to standard error.
/// Blocks signals in the calling process; call it once, from a single-threaded process.
int supervise(const Options&);

}  // namespace rz::rzrun
