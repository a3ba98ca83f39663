#pragma once
/// Memory allocation on any device.

#include <cstddef>
#include <memory>

#include "comm/core/types.h"

namespace rz {

/// Uninitialized device memory from the driver, aligned to 256 bytes. Freeing it synchronizes the device, so
/// use it for long-lived buffers. Errc::system reports the bytes required and available.
std::shared_ptr<std::byte> allocate_on(Device, std::size_t bytes);
Allocator allocator_on(Device);

/// Pinned host memory, mapped for all devices, allocated through the driver of `device`. Errc::system if it
/// fails.
std::shared_ptr<std::byte> allocate_pinned(Device, std::size_t bytes);

}  // namespace rz
