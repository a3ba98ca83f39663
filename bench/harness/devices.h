#pragma once
/// Where each rank of a run is.

#include <vector>

#include "comm/communicator.h"

namespace rz::bench {

/// A row of "Using devices".
struct DeviceLine {
  int rank = 0, pid = 0, local_rank = 0;
  char host[64] = {};
  char processor[80] = {};  ///< of host memory; else the card's name
  int pci_domain = 0, pci_bus = 0, pci_device = 0;
};

/// The lines of all ranks, on every rank. Every rank calls it together.
std::vector<DeviceLine> gather_devices(Communicator&, int local_rank);

}  // namespace rz::bench
