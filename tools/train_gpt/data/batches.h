#pragma once
/// Assignment of samples to ranks and micro-batches. It is a pure function of the update number, so all ranks
/// and any resumed run agree.

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "sharding/config/batch.h"
#include "sharding/data/sampler.h"
#include "tools/train_gpt/data/tokens.h"

namespace rz::train_gpt {

struct BatchPlan {
  std::uint64_t samples = 0;  ///< in the whole data
  BatchSizes sizes;
  int rank = 0, ranks = 1;
  bool shuffle = true, drop_last = false;
  std::uint64_t seed = 0;
};

class Batches {
 public:
  explicit Batches(BatchPlan);

  /// Indices of the samples of one micro-batch. Shuffled: the next `micro` samples of the distributed sampler
  /// for this rank, epoch after epoch. Not shuffled: update s covers samples s·B … s·B+B-1 (modulo the number
  /// of samples); rank r of W takes the B/W samples that start at r·B/W, one micro-batch after another.
  std::vector<std::uint64_t> indices(std::uint64_t update, std::uint64_t micro_batch) const;
  /// Number of updates that cover every sample about once; at least 1.
  std::uint64_t updates_per_epoch() const;

 private:
  BatchPlan plan_;
  std::optional<DistributedSampler> sampler_;
};

/// Reads inputs and targets of the samples, [samples, T] each.
void read_samples(const Tokens&, std::span<const std::uint64_t> indices, std::uint64_t seq_len,
                  std::span<std::int32_t> inputs, std::span<std::int32_t> targets);

}  // namespace rz::train_gpt
