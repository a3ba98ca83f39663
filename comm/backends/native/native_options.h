#pragma once
/// Settings of the native backend.

#include <chrono>
#include <string>

#include "comm/progress/wait_reporter.h"
#include "comm/tuning/tuning.h"

namespace rz {

struct NativeOptions {
  std::chrono::milliseconds timeout{600'000};   ///< of one request, from its submission
  std::chrono::milliseconds detection{10'000};  ///< of ranks that do not run; 0: never
  bool deterministic = true;                    ///< only algorithms that reduce in `order`
  ReductionOrder order = ReductionOrder::rank;
  std::string algorithm;  ///< forced algorithms (comm/tuning/overrides.h), or empty
  tuning::Table tuning;   ///< rules before the built-in ones; the same on every rank
  WaitReportOptions waits;
};

}  // namespace rz
