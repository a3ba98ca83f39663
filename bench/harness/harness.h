#pragma once
/// The run of a _perf program: sizes, warm-up, timing, checking, report. Shared by all collectives.

#include <functional>
#include <string>

#include "bench/collectives.h"
#include "bench/harness/options.h"

namespace rz::bench {

/// Gets what rank 0 has to say, whole lines at a time.
using Print = std::function<void(const std::string&)>;

struct Hooks {
  /// Called with a rank's result before it is checked: tests damage it here.
  std::function<void(int rank, Buffer result)> before_check;
};

/// Joins the group that the environment describes, with options.threads ranks in this process. Returns the
/// exit status: 0, or 7 if a check failed. Throws rz::Error.
int run(const Collective&, const Options&, const Print&, const Hooks& = {});

}  // namespace rz::bench
