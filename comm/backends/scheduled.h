#pragma once
/// The backend of ours: collectives as schedules on a transport.

#include <chrono>
#include <memory>
#include <string>

#include "comm/backend.h"
#include "comm/transports/transport.h"

namespace rz {

struct ScheduledOptions {
  std::chrono::milliseconds timeout{600'000};  ///< of one operation, from its submission
  bool deterministic = true;
  std::string algorithm;  ///< forces all_reduce's
};

std::unique_ptr<Backend> scheduled_backend(int rank, int size, std::unique_ptr<Transport>,
                                           const ScheduledOptions&);

}  // namespace rz
