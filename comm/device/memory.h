#pragma once
/// Copies between the memories of all devices.

#include <cstddef>

#include "comm/device/allocate.h"
#include "comm/device/stream.h"

namespace rz {

/// In the stream's order, between any two places, a host stream at once. From ordinary host memory the call
/// returns when that may be reused, to it when it holds the data; else the memory must live until the stream
/// was there.
void memcpy_async(void* to, const void* from, std::size_t bytes, const Stream&);
void memset_async(void* to, int value, std::size_t bytes, const Stream&);

}  // namespace rz
