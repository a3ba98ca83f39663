#pragma once
/// Which samples a rank takes at which micro-batch: a pure function of the update, so that all ranks and any
/// resumed run agree.

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "sharding/config/ds_config.h"
#include "sharding/data/sampler.h"
#include "tools/train_gpt/data/tokens.h"

namespace rz::train_gpt {

struct BatchPlan {
  std::uint64_t samples = 0;  ///< in the data
  BatchSizes sizes;
  int rank = 0, ranks = 1;
  bool shuffle = true, drop_last = false;
  std::uint64_t seed = 0;
};

class Batches {
 public:
  explicit Batches(BatchPlan);

  /// Indices of the samples of one micro-batch.
  /// Shuffled: the distributed sampler's next `micro` of this rank, epoch after epoch.
  /// Else: update s covers samples s·B … s·B+B-1 (modulo their number); rank r of W takes the B/W that start
  /// at r·B/W, micro-batch by micro-batch.
  std::vector<std::uint64_t> indices(std::uint64_t update, std::uint64_t micro_batch) const;
  /// Updates that see about every sample once; at least 1.
  std::uint64_t updates_per_epoch() const;

 private:
  BatchPlan plan_;
  std::optional<DistributedSampler> sampler_;
};

/// Inputs and targets, [samples, T] each.
void read_samples(const Tokens&, std::span<const std::uint64_t> indices, std::uint64_t seq_len,
                  std::span<std::int32_t> inputs, std::span<std::int32_t> targets);

}  // namespace rz::train_gpt
