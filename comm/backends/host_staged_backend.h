#pragma once
/// Serves device memory over a host backend: copies inputs to pinned memory, runs the collective there,
/// copies results back. Works between any machines that the host backend connects; throughput is that of the
/// slower of the copies and the host backend. If the host backend accepts device memory, only reductions are
/// staged.

#include <chrono>
#include <memory>

#include "comm/backend.h"

namespace rz {

struct HostStagedOptions {
  Device device;
  int rank = 0;
  std::chrono::milliseconds timeout{600'000};  ///< of one operation, from its submission
  /// Every rank's host backend accepts device memory (Backend::moves_device_memory).
  bool pass_device_memory = false;
};

/// Operations run in submission order. Work::wait_on() blocks the calling thread until the copy of the result
/// back to the device is enqueued. Operations in a captured stream fail with Errc::unsupported.
std::unique_ptr<Backend> host_staged_backend(std::shared_ptr<Backend> host, const HostStagedOptions&);

}  // namespace rz
