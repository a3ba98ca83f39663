#pragma once
/// The meta device, as PyTorch has it: tensors have shapes and no data. A program that runs on it makes the
/// same allocations and calls as on the host, and computes nothing.
///
/// Allocations reserve addresses and use no memory until something writes to them; they read as zeros.
/// Operators of tensor/ops.h, and copies and fills in a stream of this device, do nothing. Memory of the
/// device is host memory to everything else (Device::host), so that code that reads it sees zeros.

#include <cstddef>
#include <memory>

#include "../core/types.h"

namespace rz {

inline constexpr Device meta_device{Device::host, -1};

constexpr bool is_meta(Device device) { return device == meta_device; }

/// Addresses of zeros, aligned to 256 bytes. Errc::system if the system has no addresses left.
std::shared_ptr<std::byte> allocate_meta(std::size_t bytes);

}  // namespace rz
