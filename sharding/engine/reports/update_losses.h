#pragma once
/// Losses of micro-batches, and their means.

#include <cstdint>
#include <span>
#include <vector>

#include "autograd_lite/ops.h"
#include "autograd_lite/tape.h"
#include "comm/communicator.h"
#include "sharding/parallel/world.h"

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
  /// A scalar is one term. Call before its backward pass, which may reuse the memory of values.
  void add(const nn::Loss&, Tape&);
  /// Those of this rank. On a device this waits for the stream.
  std::vector<Mean> read(const Stream&) const;
  /// exact_sums() of them. On a device this waits for the stream. Collective.
  Mean sums(Communicator&, const Stream&) const;
  /// Which ranks have a loss that is not finite, by rank. On a device this waits for the stream. Collective.
  std::vector<std::uint8_t> not_finite(Communicator&, const Stream&) const;

 private:
  std::vector<nn::Loss> losses_;
  std::vector<Tensor> scalars_;  // f32, in memory of the tape, so that a graph may write them
};

}  // namespace rz
