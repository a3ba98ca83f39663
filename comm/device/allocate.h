#pragma once
/// Memory allocation on any device.

#include <cstddef>
#include <memory>

#include "../core/types.h"

namespace rz {

/// Uninitialized device memory from the driver, aligned to 256 bytes. Freeing it synchronizes the device, so
/// use it for long-lived buffers; see DeferredFrees. Errc::system reports the bytes required and available.
std::shared_ptr<std::byte> allocate_on(Device, std::size_t bytes);
Allocator allocator_on(Device);

/// Pinned host memory, mapped for all devices, allocated through the driver of `device`. Errc::system if it
/// fails.
std::shared_ptr<std::byte> allocate_pinned(Device, std::size_t bytes);

/// While an object of this class lives, memory of allocate_on() and allocate_pinned() is kept when it is
/// freed. The driver gets it back when the last object is destroyed, or when one of these functions finds no
/// other memory. For groups whose ranks are threads of one process: the driver waits for the device before it
/// frees memory, and meanwhile no thread can launch a kernel, so a rank that freed memory would not reach the
/// collective for which a peer's kernel waits on that device. Thread-safe.
class DeferredFrees {
 public:
  DeferredFrees();
  ~DeferredFrees();
  DeferredFrees(const DeferredFrees&) = delete;
  DeferredFrees& operator=(const DeferredFrees&) = delete;
};

}  // namespace rz
