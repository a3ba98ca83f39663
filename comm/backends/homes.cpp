#include "comm/backends/homes.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "comm/core/cuda/runtime.h"
#include "comm/core/machine_id.h"
#include "comm/transports/random.h"

namespace rz {

namespace {

using cuda::runtime;

cuda::DeviceProperties properties_of(Device device) {
  cuda::DeviceProperties properties;
  cuda::check(runtime().get_properties(&properties, device.index), "cudaGetDeviceProperties", device);
  return properties;
}

void put(char (&to)[16], const std::string& uuid) {
  std::memcpy(to, uuid.data(), std::min(uuid.size(), sizeof to));
}

std::uint64_t this_process() {
  static const std::uint64_t number = [] {
    std::uint64_t n = 0;
    const JobId bytes = random_id();
    std::memcpy(&n, bytes.data(), sizeof n);
    return n;
  }();
  return number ^ static_cast<std::uint64_t>(getpid());  // a fork is another process
}

/// The number of a card in this process; -1 if it is not visible here.
int find_card(const Home& home) {
  for (int i = 0; i < cuda::device_count(); ++i) {
    Home here;
    put(here.card, properties_of({Device::cuda, i}).uuid);
    if (same_card(here, home)) return i;
  }
  return -1;
}

}  // namespace

Home home_of(Device device) {
  Home home;
  const std::string machine = machine_id();
  std::memcpy(home.machine, machine.data(), std::min(machine.size(), sizeof home.machine));
  const cuda::DeviceProperties properties = properties_of(device);
  put(home.card, properties.uuid);
  home.process = this_process();
  home.device = device.index;
  home.multiprocessors = properties.multiprocessors;
  return home;
}

bool same_machine(const Home& a, const Home& b) {
  return std::memcmp(a.machine, b.machine, sizeof a.machine) == 0;
}

bool same_card(const Home& a, const Home& b) { return std::memcmp(a.card, b.card, sizeof a.card) == 0; }

bool reaches(const Home& own, const Home& other) {
  if (same_card(own, other)) return true;
  const int there = find_card(other);
  if (there < 0) return false;
  bool can = false;
  const Device device{Device::cuda, own.device};
  cuda::check(runtime().can_access_peer(&can, own.device, there), "cudaDeviceCanAccessPeer", device);
  return can;
}

}  // namespace rz
