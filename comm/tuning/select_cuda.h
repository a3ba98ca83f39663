#pragma once
/// How CUDA peers perform a call, as a pure function of what is known on every rank.

#include <cstddef>
#include <string>

#include "comm/collective.h"

namespace rz {

struct CudaSelectionQuery {
  Collective collective;
  std::size_t bytes = 0;  ///< of the whole buffer: the larger of a rank's input and output
  int size = 1;
  int max_blocks = 1;         ///< that may run at once on every rank
  std::string override_name;  ///< "one_shot", "two_shot" or empty: of all_reduce
};

struct CudaLaunchPlan {
  bool two_shot = false;   ///< all_reduce: each rank folds a part, and gathers the others
  bool zero_copy = false;  ///< peers read memory of allocate() where it lies, for one more step at the end
  int blocks = 1;
  int threads = 512;  ///< a block
};

/// Errc::config for a forced name that is none of these.
CudaLaunchPlan select_cuda_launch(const CudaSelectionQuery&);

}  // namespace rz
