#pragma once
/// The losses of an update.

#include <vector>

#include "autograd_lite/ops.h"
#include "sharding/world/mean.h"

namespace rz {

/// Losses of the micro-batches of this rank. They stay on their device until they are read.
class UpdateLosses {
 public:
  void clear() { losses_.clear(); }
  void add(const nn::Loss& loss) { losses_.push_back(loss); }
  /// Sum and number of terms on this rank. On a device this waits for the stream.
  Mean read(const Stream&) const;

 private:
  std::vector<nn::Loss> losses_;
};

}  // namespace rz
