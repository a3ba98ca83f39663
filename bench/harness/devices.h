#pragma once
/// The device of each rank of a run.

#include <vector>

#include "comm/communicator.h"

namespace rz::bench {

/// One line of "Using devices".
struct DeviceLine {
  int rank = 0, pid = 0, local_rank = 0;
  char host[64] = {};
  char processor[80] = {};  ///< processor name for host memory, otherwise the name of the card
  int pci_domain = 0, pci_bus = 0, pci_device = 0;
};

/// Returns the lines of all ranks, on every rank. Collective.
std::vector<DeviceLine> gather_devices(Communicator&, int local_rank);

}  // namespace rz::bench
