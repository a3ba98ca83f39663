#pragma once
/// Number of terms of an update's loss.

#include "comm/device/stream.h"
#include "sharding/optim/grad_norm.h"
#include "tensor/tensor.h"

namespace rz {

/// Adds the terms of micro-batches on this rank. On a device they are counted there, in the order of the
/// stream, so that a graph counts those of each run.
class LossTerms {
 public:
  /// `sum_count`: nn::Loss::sum_count.
  void add(const Tensor& sum_count, const Stream&);
  /// Counts no terms.
  void add_none(const Stream&);
  /// Starts an update.
  void reset() { counted_ = false; }
  /// Whether add() was called since reset().
  bool counted() const { return counted_; }
  /// The terms of this rank. On a device this waits for the stream.
  ExactSum read(const Stream&) const;
  /// On a device: copies the words of the sum.
  void copy_to(const Tensor& words, const Stream&) const;

 private:
  bool counted_ = false;
  ExactSum sum_;  // on the host
  Tensor words_;  // on a device: ExactLayout::words
};

}  // namespace rz
