#pragma once
/// The backend of ours: collectives as schedules on a transport.

#include <chrono>
#include <memory>
#include <string>

#include "comm/backend.h"
#include "comm/transports/transport.h"
#include "comm/tuning.h"

namespace rz {

struct ScheduledOptions {
  std::chrono::milliseconds timeout{600'000};  ///< of one operation, from its submission
  bool deterministic = true;
  std::string algorithm;  ///< that are forced (comm/forced.h)
  Tuning tuning;          ///< that comes before the built-in one; the same on every rank
};

std::unique_ptr<Backend> scheduled_backend(int rank, int size, std::unique_ptr<Transport>,
                                           const ScheduledOptions&);

}  // namespace rz
