#pragma once
/// A group of which only one rank exists, for runs on the meta device.

#include "comm/communicator.h"

namespace rz {

/// A communicator on meta_device of rank `rank` of `ranks`, whose other ranks are taken to make the same
/// calls with the same data. A call ends when it is waited for, not before. Memory of the meta device is not
/// moved. Calls other than all_gather, reduce_scatter, all_reduce, broadcast and barrier are
/// Errc::unsupported.
Communicator meta_communicator(int rank, int ranks);

}  // namespace rz
