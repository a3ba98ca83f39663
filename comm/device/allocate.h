#pragma once
/// Memory of any device.

#include <cstddef>
#include <memory>

#include "comm/core/types.h"

namespace rz {

/// Memory of the device from its driver, not initialised, aligned to 256 bytes. Freeing it waits for the
/// device: for what lives long. Errc::system states need and have.
std::shared_ptr<std::byte> allocate_on(Device, std::size_t bytes);
Allocator allocator_on(Device);

/// Host memory that all devices copy from and to without the host's help, by a call to this device's driver.
std::shared_ptr<std::byte> allocate_pinned(Device, std::size_t bytes);

}  // namespace rz
