#pragma once
/// Host memory for what a strategy on a CUDA device keeps there.

#include <cstddef>

#include "comm/core/types.h"
#include "comm/device/stream.h"
#include "sharding/model/options.h"
#include "tensor/tensor.h"

namespace rz {

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
