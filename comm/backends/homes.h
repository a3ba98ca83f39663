#pragma once
/// Where the ranks of a group on CUDA devices are: machines, processes and cards, which they tell each other
/// over the backend of host memory.

#include <cstdint>
#include <vector>

#include "comm/backend.h"
#include "comm/core/types.h"

namespace rz {

/// Plain data, to be sent as it is.
struct Home {
  char machine[160] = {};  ///< ranks for which it is the same can map each other's memory
  char card[16] = {};
  std::uint64_t process = 0;
  int device = 0;  ///< of CUDA, in this process
  int multiprocessors = 0;
};

/// This process's, on a device of its.
Home home_of(Device);
bool same_machine(const Home&, const Home&);
bool same_card(const Home&, const Home&);
/// Whether kernels on `own`, which is this process's, may read memory of `other`'s card. A card that this
/// process does not see is taken for one that they may not.
bool reaches(const Home& own, const Home& other);

/// Every rank's value; every rank calls it, as one collective.
template <class T>
std::vector<T> tell_all(Backend& host, const T& mine, int size) {
  std::vector<T> all(static_cast<std::size_t>(size));
  const Operation op{.kind = Collective::all_gather,
                     .in = ConstBuffer(&mine, sizeof mine, DType::u8),
                     .out = Buffer(all.data(), sizeof mine * all.size(), DType::u8)};
  host.submit({&op, 1}).wait();
  return all;
}

}  // namespace rz
