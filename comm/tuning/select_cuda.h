#pragma once
/// Launch parameters of a collective among CUDA peers, as a pure function of values that are the same on
/// every rank. Thread safe.

#include <cstddef>
#include <string>

#include "comm/collective.h"

namespace rz::tuning {

struct CudaSelectionQuery {
  Collective collective;
  std::size_t bytes = 0;  ///< of the whole buffer: the larger of a rank's input and output
  int size = 1;
  int max_blocks = 1;         ///< blocks that can be resident at once on every rank
  std::string override_name;  ///< forced all_reduce algorithm: "one_shot", "two_shot" or empty
};

struct CudaLaunchPlan {
  bool two_shot = false;   ///< all_reduce: each rank reduces a shard and gathers the others
  bool zero_copy = false;  ///< peers read memory of allocate() in place, which costs a step at the end
  int blocks = 1;
  int threads = 512;  ///< per block
};

/// Errc::config for another override_name.
CudaLaunchPlan select_cuda_launch(const CudaSelectionQuery&);

}  // namespace rz::tuning
