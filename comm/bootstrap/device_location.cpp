#include "comm/bootstrap/device_location.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "comm/core/lazy.h"
#include "comm/device/cuda_runtime.h"
#include "comm/net/random.h"
#include "comm/os/process.h"

namespace rz {

namespace {

using cuda::runtime;

cuda::DeviceProperties properties_of(Device device) {
  cuda::DeviceProperties properties;
  cuda::check(runtime().get_properties(&properties, device.index), "cudaGetDeviceProperties", device);
  return properties;
}

void copy_uuid(char (&to)[16], const std::string& uuid) {
  std::memcpy(to, uuid.data(), std::min(uuid.size(), sizeof to));
}

std::uint64_t process_token() {
  static constinit Lazy<std::uint64_t> number;
  const auto random = [] {
    std::uint64_t n = 0;
    const net::JobId bytes = net::random_id();
    std::memcpy(&n, bytes.data(), sizeof n);
    return n;
  };
  return number.get(random) ^ static_cast<std::uint64_t>(getpid());  // differs in a child of fork()
}

/// CUDA device index of the GPU in this process; -1 if it is not visible here.
int find_gpu(const DeviceLocation& location) {
  for (int i = 0; i < cuda::device_count(); ++i) {
    DeviceLocation here;
    copy_uuid(here.gpu_uuid, properties_of({Device::cuda, i}).uuid);
    if (same_gpu(here, location)) return i;
  }
  return -1;
}

}  // namespace

DeviceLocation locate_device(Device device) {
  DeviceLocation location;
  const std::string machine = machine_id();
  std::memcpy(location.machine, machine.data(), std::min(machine.size(), sizeof location.machine));
  const cuda::DeviceProperties properties = properties_of(device);
  copy_uuid(location.gpu_uuid, properties.uuid);
  location.process_id = process_token();
  location.device = device.index;
  location.multiprocessors = properties.multiprocessors;
  return location;
}

bool same_machine(const DeviceLocation& a, const DeviceLocation& b) {
  return std::memcmp(a.machine, b.machine, sizeof a.machine) == 0;
}

bool same_gpu(const DeviceLocation& a, const DeviceLocation& b) {
  return std::memcmp(a.gpu_uuid, b.gpu_uuid, sizeof a.gpu_uuid) == 0;
}

bool can_access_peer(const DeviceLocation& own, const DeviceLocation& other) {
  if (same_gpu(own, other)) return true;
  const int there = find_gpu(other);
  if (there < 0) return false;
  bool can = false;
  const Device device{Device::cuda, own.device};
  cuda::check(runtime().can_access_peer(&can, own.device, there), "cudaDeviceCanAccessPeer", device);
  return can;
}

}  // namespace rz
