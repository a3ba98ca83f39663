#pragma once
/// Batches of equal size in an order that runs on from epoch to epoch, as for language models.

#include <optional>

#include "batch_sampler.h"

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
/// next. Not shuffled, or consecutive: with B samples per update, update u covers positions u·B … u·B + B - 1
/// of the order, which runs on from epoch to epoch, and rank r takes the B/ranks that start at r·B/ranks, one
/// batch after another.
class ContinuousBatchSampler : public BatchSampler {
 public:
  /// Errc::invalid_argument if there are too few samples, or an option is out of range.
  explicit ContinuousBatchSampler(ContinuousBatchOptions);

  /// The batches of updates(). An epoch is only a unit of counting here.
  std::uint64_t batches() const override { return updates() * options_.accumulation; }
  std::size_t batch_size() const override { return options_.batch_size; }
  Batch at(std::uint64_t epoch, std::uint64_t batch) const override;
  std::size_t global_batch_size() const override {
    return options_.batch_size * static_cast<std::size_t>(options_.ranks);
  }
  std::string order() const override {
    return order_of_samples(options_.samples, options_.shuffle, options_.seed);
  }
  /// The pass over the data, and its samples that come before.
  LoaderPosition position(std::uint64_t epoch, std::uint64_t batch) const override;
  Resumed starting_at(const LoaderPosition&) const override;

  /// Number of updates that cover every sample about once; at least 1.
  std::uint64_t updates() const;

 private:
  const EpochStart& start_of(std::uint64_t batch) const;
  /// Number `n` of this rank's samples from a start on, shuffled and not consecutive.
  LoaderPosition of_rank(const EpochStart&, std::uint64_t n) const;
  /// Number `n` of all samples from a start on, in the order that does not depend on the number of ranks.
  LoaderPosition of_all(const EpochStart&, std::uint64_t n) const;
  /// Samples of a rank in the pass of a start.
  std::uint64_t left_of_pass(const EpochStart&) const;

  ContinuousBatchOptions options_;
  std::optional<DistributedSampler> sampler_;  // shuffled, and not consecutive
  EpochStart first_, resumed_;                 // their batches are numbered through all epochs
};

}  // namespace rz
