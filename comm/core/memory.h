#pragma once
/// Memory of any device, and the copies between them.

#include <cstddef>
#include <memory>

#include "comm/core/stream.h"
#include "comm/core/types.h"

namespace rz {

/// Memory of the device from its driver, not initialised, aligned to 256 bytes. Giving it back waits for the
/// device: for what lives long. Errc::system states need and have.
std::shared_ptr<std::byte> allocate_on(Device, std::size_t bytes);
Allocator allocator_on(Device);

/// Host memory that all devices copy from and to without the host's help, by a call to this device's driver.
std::shared_ptr<std::byte> allocate_pinned(Device, std::size_t bytes);

/// In the stream's order, between any two places, a host stream at once. From ordinary host memory the call
/// returns when that may be reused, to it when it holds the data; else the memory must live until the stream
/// was there.
void copy_bytes(void* to, const void* from, std::size_t bytes, const Stream&);
void set_bytes(void* to, int value, std::size_t bytes, const Stream&);

}  // namespace rz
