#pragma once
/// Copies that bypass the caches, for data that is larger than any cache.

#include <cstddef>

namespace rz {

/// memcpy() with non-temporal stores: destination lines are not read first, and cached data is not evicted.
/// Useful if the destination exceeds the last-level cache, so that its lines would be evicted anyway. The
/// stores are ordered before later stores of the calling thread. Thread safe.
void copy_nontemporal(void* to, const void* from, std::size_t bytes);

}  // namespace rz
