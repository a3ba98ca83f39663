#pragma once
/// Runs a job from its first process to its last.

#include "tools/rzrun/options.h"

namespace rz::rzrun {

/// Starts the ranks, forwards their output, ends all when one fails or a signal comes, and returns rzrun's
/// exit status. Nothing that a rank started outlives it. Writes to standard error what there is to say.
/// Blocks signals of the calling process; call it once, from a process without threads.
int supervise(const Options&);

}  // namespace rz::rzrun
