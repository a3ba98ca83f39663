#pragma once
/// Settings of the backend for the device memory of one node.

#include <chrono>
#include <cstddef>
#include <string>

#include "comm/core/long_wait.h"
#include "comm/core/types.h"

namespace rz {

struct PeerCudaOptions {
  int rank = 0, size = 1;
  Device device;
  std::chrono::milliseconds timeout{600'000};  ///< of one operation, from its start on the device
  std::string algorithm;                       ///< forces all_reduce's algorithm; empty: select_cuda_launch()
  std::size_t slot_bytes = 128 << 10;          ///< bytes that a block moves per step; the same on every rank
  WaitReportOptions waits;
};

}  // namespace rz
