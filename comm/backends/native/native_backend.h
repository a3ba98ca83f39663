#pragma once
/// The native backend for host memory: collectives by the intra-node engine, or by schedules over a
/// transport.

#include <chrono>
#include <memory>
#include <string>

#include "comm/backend.h"
#include "comm/progress/wait_reporter.h"
#include "comm/transport/transport.h"
#include "comm/tuning/tuning.h"

namespace rz {

struct NativeOptions {
  std::chrono::milliseconds timeout{600'000};  ///< of one request, from its submission
  bool deterministic = true;                   ///< only algorithms that reduce in `order`
  ReductionOrder order = ReductionOrder::rank;
  std::string algorithm;  ///< forced algorithms (comm/tuning/overrides.h), or empty
  tuning::Table tuning;   ///< rules before the built-in ones; the same on every rank
  WaitReportOptions waits;
};

/// Backend of rank `rank` of a group of `size`. Errc::config if options.algorithm does not fit the group.
/// The process's progress thread drives it (comm/progress/progress_driver.h).
std::unique_ptr<Backend> make_native_backend(int rank, int size, std::unique_ptr<Transport>,
                                             const NativeOptions&);

}  // namespace rz
