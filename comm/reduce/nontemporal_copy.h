#pragma once
/// Copying what is too large for any cache.

#include <cstddef>

namespace rz {

/// As memcpy, but what is written goes past the caches, so that its lines are not read first and what lies in
/// the caches stays. Pays where it would not be found there again anyhow: beyond the last-level cache.
/// Ordered before what the calling thread writes next.
void copy_nontemporal(void* to, const void* from, std::size_t bytes);

}  // namespace rz
