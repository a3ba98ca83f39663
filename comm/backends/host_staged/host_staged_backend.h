#pragma once
/// Device memory over a backend that moves host memory: copied to pinned memory, combined there, copied back.
/// Works over everything that host memory works over, between any machines, at the speed of the slower of
/// both ways. Over one that takes device memory itself, only what is combined goes this way.

#include <chrono>
#include <memory>

#include "comm/backend.h"

namespace rz {

struct HostStagedOptions {
  Device device;
  int rank = 0;
  std::chrono::milliseconds timeout{600'000};  ///< of one operation, from its submission
  /// The host's backend takes device memory (Backend::moves_device_memory), on every rank.
  bool pass_device_memory = false;
};

/// Operations run in the order of their submission. Work::wait_on() blocks the host until the result is on
/// its way back to the device.
std::unique_ptr<Backend> host_staged_backend(std::shared_ptr<Backend> host, const HostStagedOptions&);

}  // namespace rz
