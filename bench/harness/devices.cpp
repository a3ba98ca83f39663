#include "bench/harness/devices.h"

#include <unistd.h>

#include "comm/device/cuda_runtime.h"
#include "comm/topology.h"

namespace rz::bench {
namespace {

void describe_card(DeviceLine& line, Device device) {
  cuda::DeviceProperties card;
  cuda::check(cuda::runtime().get_properties(&card, device.index), "cudaGetDeviceProperties", device);
  line.local_rank = device.index;
  line.pci_domain = card.pci_domain, line.pci_bus = card.pci_bus, line.pci_device = card.pci_device;
  card.name.copy(line.processor, sizeof line.processor - 1);
}

}  // namespace

std::vector<DeviceLine> gather_devices(Communicator& comm, int local_rank) {
  DeviceLine own{comm.rank(), ::getpid(), local_rank};
  ::gethostname(own.host, sizeof own.host - 1);
  const Device device = comm.options().device;
  if (device.kind == Device::host)
    read_topology().processor.copy(own.processor, sizeof own.processor - 1);
  else
    describe_card(own, device);
  std::vector<DeviceLine> all(static_cast<std::size_t>(comm.size()));
  comm.all_gather({&own, sizeof own, DType::u8}, {all.data(), all.size() * sizeof own, DType::u8}).wait();
  return all;
}

}  // namespace rz::bench
