#pragma once
/// Runs a _perf program: sizes, warm-up, timing, checking, report. Shared by all collectives.

#include <functional>
#include <string>

#include "bench/collectives.h"
#include "bench/harness/options.h"
#include "bench/harness/validation.h"

namespace rz::bench {

/// Output function, called on rank 0 with whole lines.
using Print = std::function<void(const std::string&)>;

/// Connects the group described by the environment, with options.threads x options.gpus ranks in this
/// process, and runs all cases. Returns the exit status: 0, or 7 if a check failed or the average bus
/// bandwidth is too low (bench/harness/variables.h); it is equal on all ranks. The file of -J is emptied
/// first, and receives the error of a run that fails. Throws rz::Error.
int run(const Collective&, const Options&, const Print&, const Hooks& = {});

}  // namespace rz::bench
