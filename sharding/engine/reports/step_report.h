#pragma once
/// What an update did.

#include <cstdint>

namespace rz {

struct StepReport {
  std::int64_t step = 0;           ///< number of the update, from 0; skipped updates count
  double grad_norm = 0;            ///< before clipping, without the loss scale; NaN if a loss is not finite
  double lr = 0;                   ///< of the first group
  double loss_scale = 1;           ///< in the gradients of this update
  std::int64_t samples = 0;        ///< of all updates so far, over all ranks
  std::int64_t skipped_steps = 0;  ///< of all updates so far
  bool skipped = false;            ///< the gradients were not finite; the parameters are as before
  bool without_terms = false;      ///< it is skipped because no rank has counted a term of its losses
  double seconds = 0;              ///< from the end of the update before, or from the start of train_batch()
  double exposed_seconds = 0;      ///< waited for communication on this rank; NaN in a graph, which hides it
  double data_seconds = 0;         ///< of `seconds`: waited for batches of attached loaders on this rank
  bool ran_graph = false;          ///< the update was replayed from a CUDA graph
};

}  // namespace rz
