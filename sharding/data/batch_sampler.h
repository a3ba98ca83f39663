#pragma once
/// Which samples form each batch of a rank.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "loader_positions.h"

namespace rz {

/// A permutation of [0, size) that computes each value from (size, key) in O(1) time and memory: a Feistel
/// network over the next even power of two, iterated until the value is inside [0, size) (cycle walking:
/// Black and Rogaway, "Ciphers with arbitrary finite domains", 2002, doi:10.1007/3-540-45760-7_9). Does not
/// reproduce the bits of torch.randperm.
class Permutation {
 public:
  /// Different keys give different permutations.
  Permutation(std::uint64_t size, std::uint64_t key);
  std::uint64_t operator()(std::uint64_t i) const;  ///< i < size

 private:
  std::uint64_t encrypt(std::uint64_t) const;
  std::uint64_t size_, key_, mask_;
  int half_bits_;
};

/// A number that differs for every sample and epoch.
std::uint64_t seed_of_sample(std::uint64_t seed, std::uint64_t epoch, std::uint64_t sample);

struct SamplerOptions {
  std::uint64_t samples = 0;  ///< N
  int ranks = 1;              ///< W
  int rank = 0;               ///< r
  bool shuffle = true;
  bool drop_last = false;
  std::uint64_t seed = 0;
};

/// If drop_last is set and N mod W ≠ 0, each rank gets n = ⌈(N-W)/W⌉ samples, otherwise n = ⌈N/W⌉. The order
/// of an epoch is the permutation seeded with seed + epoch (without shuffle: 0, 1, …), padded cyclically or
/// truncated to nW samples. Rank r takes [r : nW : W]. An index is a pure function of (seed, epoch,
/// position), so resuming costs nothing.
class DistributedSampler {
 public:
  /// Errc::invalid_argument if there are no samples or the rank is out of range.
  explicit DistributedSampler(SamplerOptions);

  std::uint64_t per_rank() const { return per_rank_; }                                            ///< n
  std::uint64_t total() const { return per_rank_ * static_cast<std::uint64_t>(options_.ranks); }  ///< nW
  /// Sample at `position` < per_rank() of this rank in an epoch.
  std::uint64_t index(std::uint64_t epoch, std::uint64_t position) const;
  /// Sample at `position` < total() of the order shared by all ranks.
  std::uint64_t global_index(std::uint64_t epoch, std::uint64_t position) const;

 private:
  SamplerOptions options_;
  std::uint64_t per_rank_ = 0;
};

/// A pure function of (epoch, batch), so that a run resumes at any batch. Thread-safe.
class BatchSampler {
 public:
  struct Batch {
    std::vector<std::uint64_t> indices;  ///< at most batch_size()
    std::size_t padding = 0;             ///< trailing indices that repeat samples of the epoch
    /// The pass over the data to which each index belongs; empty: the epoch of the batch.
    std::vector<std::uint64_t> passes{};
  };
  /// Where a run goes on: with this batch of an epoch.
  struct Resumed {
    std::shared_ptr<const BatchSampler> sampler;  ///< null: the sampler itself
    std::uint64_t epoch = 0, batch = 0;
  };

  virtual ~BatchSampler() = default;
  /// Batches of an epoch, at least 1, the same on all ranks.
  virtual std::uint64_t batches() const = 0;
  /// Samples of the largest batch.
  virtual std::size_t batch_size() const = 0;
  virtual Batch at(std::uint64_t epoch, std::uint64_t batch) const = 0;
  /// Samples of a batch of all ranks.
  virtual std::size_t global_batch_size() const = 0;
  /// "1115 samples, shuffled with seed 0": what decides on the order of samples besides ranks and batches; by
  /// default empty.
  virtual std::string order() const { return {}; }

  /// The samples that come before the update of a batch, for any number of ranks and size of batches. By
  /// default those of the batches before it in the epoch.
  virtual LoaderPosition position(std::uint64_t epoch, std::uint64_t batch) const;
  /// Goes on after these samples: the samplers below have each of the others of the epoch once, whatever
  /// ranks and batches there were before. By default batches begin with the last one that starts there or
  /// before.
  virtual Resumed starting_at(const LoaderPosition&) const;
};

struct BatchSamplerOptions {
  std::uint64_t samples = 0;   ///< of the whole dataset
  std::size_t batch_size = 1;  ///< of one rank
  int ranks = 1, rank = 0;
  bool shuffle = true;
  bool drop_last = false;  ///< without the incomplete last batch, as dataloader_drop_last of DeepSpeed
  std::uint64_t seed = 0;  ///< of the order, with the epoch
};

/// BatchSampler::order() of the samplers below.
std::string order_of_samples(std::uint64_t samples, bool shuffle, std::uint64_t seed);

/// The epoch in which a run was resumed: its batches from `batch` on begin after `samples` of its order.
/// Others begin at its beginning.
struct EpochStart {
  std::uint64_t epoch = 0, batch = 0, samples = 0;

  /// The samples before this batch from which batches are counted, and its number from there on.
  std::pair<std::uint64_t, std::uint64_t> of(std::uint64_t in_epoch, std::uint64_t number) const {
    const bool resumed = in_epoch == epoch && number >= batch;
    return {resumed ? samples : 0, resumed ? number - batch : number};
  }
};

/// The samples of DistributedSampler in batches, as DataLoader cuts them. Every rank has the same number of
/// samples; a rank whose share is one smaller repeats a sample as padding.
class DistributedBatchSampler : public BatchSampler {
 public:
  /// Errc::invalid_argument if there are no samples, no batch, or no such rank.
  explicit DistributedBatchSampler(BatchSamplerOptions);

  std::uint64_t batches() const override { return batches_; }
  std::size_t batch_size() const override { return options_.batch_size; }
  Batch at(std::uint64_t epoch, std::uint64_t batch) const override;
  std::size_t global_batch_size() const override {
    return options_.batch_size * static_cast<std::size_t>(options_.ranks);
  }
  std::string order() const override {
    return order_of_samples(options_.samples, options_.shuffle, options_.seed);
  }
  LoaderPosition position(std::uint64_t epoch, std::uint64_t batch) const override;
  Resumed starting_at(const LoaderPosition&) const override;

 private:
  BatchSamplerOptions options_;
  DistributedSampler sampler_;
  std::uint64_t batches_;
  EpochStart start_;
};

/// Batches that do not depend on the number of ranks. Batch g of an epoch has samples g · batch_size … of its
/// order; update u consists of the `ranks` · `accumulation` batches from u · ranks · accumulation on, and
/// rank r has `accumulation` consecutive ones of them, from r · accumulation on. An epoch has whole updates:
/// the first samples are repeated as padding of the last one, or, with drop_last, an incomplete update is
/// left out.
class ConsecutiveBatchSampler : public BatchSampler {
 public:
  /// Errc::invalid_argument if there are no samples, no batch, no such rank, or, with drop_last, no update.
  ConsecutiveBatchSampler(BatchSamplerOptions, std::size_t accumulation);

  std::uint64_t batches() const override { return updates_ * accumulation_; }
  std::size_t batch_size() const override { return options_.batch_size; }
  Batch at(std::uint64_t epoch, std::uint64_t batch) const override;
  std::size_t global_batch_size() const override {
    return options_.batch_size * static_cast<std::size_t>(options_.ranks);
  }
  std::string order() const override {
    return order_of_samples(options_.samples, options_.shuffle, options_.seed);
  }
  LoaderPosition position(std::uint64_t epoch, std::uint64_t batch) const override;
  Resumed starting_at(const LoaderPosition&) const override;

 private:
  BatchSamplerOptions options_;
  std::uint64_t accumulation_;
  DistributedSampler sampler_;
  std::uint64_t updates_;
  EpochStart start_;
};

}  // namespace rz
