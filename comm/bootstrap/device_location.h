#pragma once
/// Machine, process and GPU of each rank of a group on CUDA devices, exchanged through the backend for host
/// memory.

#include <cstdint>
#include <vector>

#include "comm/backend.h"
#include "comm/core/types.h"

namespace rz {

/// Plain data, sent as it is.
struct DeviceLocation {
  char machine[160] = {};  ///< machine_id(): ranks with equal ids can map each other's memory
  char gpu_uuid[16] = {};
  std::uint64_t process_id = 0;  ///< random, unique per process and fork
  int device = 0;                ///< CUDA device index in the rank's process
  int multiprocessors = 0;
};

/// The location of this process on one of its devices. Throws if CUDA does not report the device's
/// properties.
DeviceLocation locate_device(Device);
bool same_machine(const DeviceLocation&, const DeviceLocation&);
bool same_gpu(const DeviceLocation&, const DeviceLocation&);
/// Whether kernels on `own`, a device of this process, can access memory of `other`'s GPU. False if this
/// process does not see that GPU.
bool can_access_peer(const DeviceLocation& own, const DeviceLocation& other);

/// All-gather of one plain-data value per rank on the backend `host`; blocks. Every rank must call it.
template <class T>
std::vector<T> all_gather_value(Backend& host, const T& mine, int size) {
  std::vector<T> all(static_cast<std::size_t>(size));
  const CollectiveCall op{.kind = Collective::all_gather,
                          .in = ConstBuffer(&mine, sizeof mine, DType::u8),
                          .out = Buffer(all.data(), sizeof mine * all.size(), DType::u8)};
  host.submit({&op, 1}).wait();
  return all;
}

}  // namespace rz
