#pragma once
/// The samples of an update on the device of the model.

#include <cstdint>
#include <vector>

#include "comm/device/stream.h"
#include "tensor/tensor.h"
#include "tools/train_gpt/data/batches.h"
#include "tools/train_gpt/data/tokens.h"

namespace rz::train_gpt {

/// Tokens of [samples, T] each.
struct MicroBatch {
  Tensor inputs, targets;
};

/// The micro-batches of a rank. Their memory is allocated once, so that a graph may read it.
class MicroBatches {
 public:
  /// Allocates memory on the device of the stream.
  MicroBatches(Tokens, const BatchPlan&, std::size_t seq_len, const Stream&);

  /// Reads the samples of an update, and copies them in the order of the stream.
  void read(std::uint64_t update, const Stream&);
  std::size_t size() const { return list_.size(); }
  const MicroBatch& operator[](std::size_t m) const { return list_[m]; }
  std::uint64_t updates_per_epoch() const { return batches_.updates_per_epoch(); }

 private:
  Tokens tokens_;
  Batches batches_;
  std::size_t seq_len_;
  std::vector<std::int32_t> inputs_, targets_;  // of one micro-batch, in host memory
  std::vector<MicroBatch> list_;
};

}  // namespace rz::train_gpt
