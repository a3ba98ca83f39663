#pragma once
/// Batches of equal size in an order that runs on from epoch to epoch, as for language models.

#include <optional>

#include "sharding/data/batch_sampler.h"

namespace rz {

struct ContinuousBatchOptions {
  std::uint64_t samples = 0;     ///< of the whole dataset
  std::size_t batch_size = 1;    ///< of one rank
  std::size_t accumulation = 1;  ///< batches of a rank in one update
  int ranks = 1, rank = 0;
  bool shuffle = true;
  bool drop_last = false;  ///< shuffled: the samples that the ranks do not share evenly, in each epoch
  std::uint64_t seed = 0;  ///< of the order, with the epoch
  /// Shuffled batches, too, are consecutive samples that do not depend on the number of ranks. drop_last then
  /// has no effect, as no sample is left out.
  bool consecutive = false;
};

/// No batch is smaller, and none has padding. Update u consists of batches u·A … u·A + A - 1 of every rank.
/// Shuffled: the next samples of DistributedSampler; a batch may begin in one pass over them and end in the
/// next. Not shuffled, or consecutive: with B samples an update, update u covers positions u·B … u·B + B - 1
/// of the order, which runs on from epoch to epoch, and rank r takes the B/ranks that start at r·B/ranks, one
/// batch after another.
class ContinuousBatchSampler : public BatchSampler {
 public:
  /// Errc::invalid_argument if there are too few samples, or an option is out of range.
  explicit ContinuousBatchSampler(ContinuousBatchOptions);

  /// Those of updates(). An epoch is only a unit of counting here.
  std::uint64_t batches() const override { return updates() * options_.accumulation; }
  std::size_t batch_size() const override { return options_.batch_size; }
  Batch at(std::uint64_t epoch, std::uint64_t batch) const override;
  std::size_t global_batch_size() const override {
    return options_.batch_size * static_cast<std::size_t>(options_.ranks);
  }

  /// Number of updates that cover every sample about once; at least 1.
  std::uint64_t updates() const;

 private:
  /// Sample at a position of the order that does not depend on the number of ranks.
  std::uint64_t sample_at(std::uint64_t position) const;

  ContinuousBatchOptions options_;
  std::optional<DistributedSampler> sampler_;  // shuffled, and not consecutive
};

}  // namespace rz
