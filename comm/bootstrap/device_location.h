#pragma once
/// Where the ranks of a group on CUDA devices are: machines, processes and cards, which they tell each other
/// over the backend of host memory.

#include <cstdint>
#include <vector>

#include "comm/backend.h"
#include "comm/core/types.h"

namespace rz {

/// Plain data, to be sent as it is.
struct DeviceLocation {
  char machine[160] = {};  ///< ranks for which it is the same can map each other's memory
  char gpu_uuid[16] = {};
  std::uint64_t process_id = 0;
  int device = 0;  ///< of CUDA, in this process
  int multiprocessors = 0;
};

/// This process's, on a device of its.
DeviceLocation locate_device(Device);
bool same_machine(const DeviceLocation&, const DeviceLocation&);
bool same_gpu(const DeviceLocation&, const DeviceLocation&);
/// Whether kernels on `own`, which is this process's, may read memory of `other`'s card. A card that this
/// process does not see is taken for one that they may not.
bool can_access_peer(const DeviceLocation& own, const DeviceLocation& other);

/// Every rank's value; every rank calls it, as one collective.
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
