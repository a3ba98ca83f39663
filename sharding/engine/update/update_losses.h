#pragma once
/// The losses of an update.

#include <span>
#include <vector>

#include "autograd_lite/ops.h"
#include "comm/communicator.h"
#include "sharding/world/mean.h"

namespace rz {

/// The mean over the terms of all ranks, whose sums are exact: it does not depend on which rank has which
/// micro-batches. NaN without terms. Collective.
double exact_mean(std::span<const Mean> micro_batches, Communicator&);

/// Losses of the micro-batches of this rank. They stay on their device until they are read.
class UpdateLosses {
 public:
  void clear() { losses_.clear(); }
  void add(const nn::Loss& loss) { losses_.push_back(loss); }
  /// exact_mean() of them. On a device this waits for the stream. Collective.
  double mean(Communicator&, const Stream&) const;

 private:
  std::vector<nn::Loss> losses_;
};

}  // namespace rz
