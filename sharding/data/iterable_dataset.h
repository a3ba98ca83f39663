#pragma once
/// Samples that are read one after the other: files, sockets, generators.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "dataset.h"

namespace rz {

/// The samples of one shard in their order. One thread at a time.
class ShardReader {
 public:
  virtual ~ShardReader() = default;
  /// Writes all fields of the next sample to a row, as Dataset::read(). False, and no sample, at the end.
  virtual bool read(BatchRows& to, std::size_t row) = 0;
};

/// A stream of samples in shards, as torch.utils.data.IterableDataset. Sample i of an epoch is sample i / K
/// of shard i mod K, with K shards. This order, and BatchRows::draw(), depend on nothing else, so a run goes
/// on from a checkpoint exactly, on any number of ranks and with any size of batches. If the number of ranks
/// divides K, each shard is read by one rank; rank r reads the shards s with s mod ranks = r, in a run that
/// was not resumed amidst an epoch on another number of ranks. Otherwise, and with batches of consecutive
/// samples (ConsecutiveBatchSampler), a rank reads all shards of which it has samples, and drops those of the
/// other ranks. The const functions may be called from several threads at once.
class IterableDataset {
 public:
  /// The samples of a shard whose epoch never ends.
  static constexpr std::uint64_t endless = std::uint64_t{1} << 40;

  virtual ~IterableDataset() = default;
  virtual std::vector<Field> fields() const = 0;
  /// K. As many threads of a Loader as a rank has shards can read at a time.
  virtual std::size_t shards() const { return 1; }
  /// Samples of each shard that are an epoch. A shard that has fewer begins again at its end; of one that has
  /// more, the others are not read. For shards whose sizes are known and differ, a Dataset reads each sample
  /// once.
  virtual std::uint64_t samples_per_shard() const { return endless; }
  /// A reader whose next sample is sample `position` of the shard in this epoch; at the end if it has no more
  /// than that. A source that cannot go there throws.
  virtual std::unique_ptr<ShardReader> open(std::size_t shard, std::uint64_t epoch,
                                            std::uint64_t position) const = 0;
  /// The same as Dataset::checksum().
  virtual std::optional<std::uint64_t> checksum() const { return std::nullopt; }

  /// Samples of an epoch.
  std::uint64_t size() const { return shards() * samples_per_shard(); }
};

}  // namespace rz
