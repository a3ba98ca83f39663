#pragma once
/// Size of a rank's staging ring, through which its peers on the same host receive data.

#include <cstddef>

#include "comm/topology.h"

namespace rz {

/// Size in bytes for each of `ranks` ranks on a host with these caches: twice the L2, but at most a quarter
/// of the rank's share of the L3, and at least 1 MiB. A multiple of 64 KiB, the largest common page size.
///
/// Reason: a store to a line that is still in a reader's L2 must first invalidate it there. In a ring of this
/// size, most lines have left the reader's L2 before the writer reuses them. The ring must fit into the L3,
/// since it would otherwise be read from memory.
std::size_t staging_ring_bytes(const Caches&, std::size_t ranks);

}  // namespace rz
