#pragma once
/// Copies and fills on any device.

#include <cstddef>

#include "allocate.h"
#include "stream.h"

namespace rz {

/// Copies between any two memories in stream order; on a host stream at once (memmove). With pageable host
/// memory as the source, the call returns when the source may be reused, and waits for the stream if there
/// are more than 64 KiB; as the target, when the data has arrived. All other memory must stay valid until the
/// stream has passed the copy. Errc::system if the device
/// reports an error.
void memcpy_async(void* to, const void* from, std::size_t bytes, const Stream&);
void memset_async(void* to, int value, std::size_t bytes, const Stream&);

}  // namespace rz
