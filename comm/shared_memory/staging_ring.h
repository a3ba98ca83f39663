#pragma once
/// The size of the ring of bytes through which a rank stages what its peers on the same host read.

#include <cstddef>

#include "comm/topology.h"

namespace rz {

/// Bytes, a multiple of the largest usual page, for one of `ranks` ranks of a host with these caches: twice
/// the second-level cache, but at most a quarter of the rank's share of the third, and at least 1 MiB.
///
/// A store to a line that a reader's second-level cache still holds has to invalidate it there first. When a
/// rank comes round to a place in a ring of this size, that line has mostly left the cache. The third level
/// has to keep the ring, since what it does not keep is read from memory.
std::size_t staging_ring_bytes(const Caches&, std::size_t ranks);

}  // namespace rz
