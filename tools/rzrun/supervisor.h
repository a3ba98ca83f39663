#pragma once

#include "tools/rzrun/flags/job.h"

namespace rz::rzrun {

/// Starts the ranks, forwards their output, terminates all of them when one fails or a signal arrives, starts
/// them again as the options allow, and returns the exit status of rzrun. No process started by a rank
/// survives, and none of a group lives when the next group starts. Diagnostics go to standard error. Blocks
/// signals in the calling process; call it once, from a single-threaded process.
int supervise(const Options&);

}  // namespace rz::rzrun
