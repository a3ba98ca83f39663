#pragma once
/// Host memory for what a strategy on a CUDA device keeps there.

#include <cstddef>

#include "comm/core/types.h"
#include "comm/device/stream.h"
#include "tensor/tensor.h"

namespace rz {

enum class OffloadDevice { none, cpu };
/// "none", "cpu".
const char* name(OffloadDevice);

/// Must be equal on all ranks. Names are those of DeepSpeed's "offload_optimizer" and "offload_param".
struct OffloadOptions {
  OffloadDevice device = OffloadDevice::none;
  /// Copies from and to pinned memory overlap with computation, and may be captured in a graph. Others may
  /// not: the host waits for each of them.
  bool pin_memory = true;
  /// Share of the optimizer state, from 0 to 1. Whole buckets are offloaded, in the order of reduction, until
  /// they hold at least this share. Not of parameters.
  double ratio = 1;
  bool operator==(const OffloadOptions&) const = default;
};

/// Errc::invalid_argument if the ratio is out of range; `key` names the options.
void check(const OffloadOptions&, const char* key);

/// Allocates host memory for copies from and to `device`.
Allocator offload_allocator(const OffloadOptions&, Device device);
/// Errc::unsupported if a capture of the stream would have to contain copies of memory that is not pinned.
void require_may_copy(const OffloadOptions&, const Stream&);

/// Bytes in memory of the strategy's device, and in host memory beside it. On the host all are the former.
struct HeldBytes {
  std::size_t on_device = 0, on_host = 0;
  void add(const Tensor& held, Device own) {
    if (held.defined()) (held.device() == own ? on_device : on_host) += held.bytes();
  }
};

}  // namespace rz
