#pragma once
/// The losses of an update.

#include <cstdint>
#include <span>
#include <vector>

#include "autograd_lite/ops.h"
#include "comm/communicator.h"
#include "sharding/engine/mean.h"

namespace rz {

/// The sum and the number of the terms of all ranks, which are exact: they do not depend on which rank has
/// which micro-batches. Collective.
Mean exact_sums(std::span<const Mean> micro_batches, Communicator&);
/// The mean of exact_sums(). NaN without terms. Collective.
double exact_mean(std::span<const Mean> micro_batches, Communicator&);

/// Losses of the micro-batches of this rank. They stay on their device until they are read.
class UpdateLosses {
 public:
  void clear() {
    losses_.clear();
    scalars_.clear();
  }
  void add(const nn::Loss& loss) { losses_.push_back(loss); }
  /// Adds a loss without terms, a scalar, as one term.
  void add_scalar(const Tensor& value, const Stream&);
  /// exact_sums() of them. On a device this waits for the stream. Collective.
  Mean sums(Communicator&, const Stream&) const;
  /// Which ranks have a loss that is not finite, by rank. On a device this waits for the stream. Collective.
  std::vector<std::uint8_t> not_finite(Communicator&, const Stream&) const;

 private:
  /// Of this rank.
  std::vector<Mean> read(const Stream&) const;

  std::vector<nn::Loss> losses_;
  std::vector<Tensor> scalars_;  // f32
};

}  // namespace rz
