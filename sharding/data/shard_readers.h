#pragma once
/// The shards of an IterableDataset, read by the threads of a loader.

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "sharding/data/batch_sampler.h"
#include "sharding/data/dataset.h"
#include "sharding/data/iterable_dataset.h"
#include "tensor/tensor.h"

namespace rz {

/// Threads read batches, which they begin in order. The samples of a shard are read by one batch after the
/// other, those of different shards at the same time.
///
/// With a buffer of M samples, samples are shuffled within windows of M samples of their shard, by the seed,
/// the epoch and the window alone. While a window is returned, the next one is read, sample by sample. A run
/// that is resumed reads its windows again from where they begin.
class ShardReaders {
 public:
  /// `fields`: fields_of_batches(). `buffer`: samples of a window; 0 or 1: in order.
  ShardReaders(std::shared_ptr<const IterableDataset>, std::vector<Field> fields, std::uint64_t seed,
               std::size_t buffer);

  /// The next batch is this one; no batch is read now.
  void restart(std::uint64_t batch);
  /// Reads the samples of a batch of an epoch, indices of its order, to rows [rows, shape…], and replaces the
  /// indices by those of the samples that were read. Errors begin with shard and sample.
  void read(std::uint64_t batch, std::uint64_t epoch, BatchSampler::Batch&, std::span<const Tensor> to,
            const std::atomic<bool>& cancelled);
  /// This batch is not read, unless it has been.
  void skip(std::uint64_t batch);

 private:
  /// Samples that are read ahead, to be returned in another order.
  struct Window {
    std::uint64_t epoch = 0, number = 0;
    std::size_t filled = 0;
    std::vector<Tensor> memory{};
    std::map<std::size_t, std::exception_ptr> errors{};  // of samples that could not be read
  };
  struct Shard {
    std::deque<std::uint64_t> batches{};  // that read it, in order
    // The rest is used by the first of them only.
    std::unique_ptr<ShardReader> reader{};
    std::uint64_t epoch = 0;
    std::uint64_t next = 0;                 // sample of the reader, counted through repetitions
    std::uint64_t begin = 0;                // that of the repetition of the shard
    std::uint64_t opened = 0;               // sample of the shard where the reader began
    std::optional<std::uint64_t> length{};  // of the shard, once it has ended
    std::array<Window, 2> windows{};
  };
  class Turn;

  std::uint64_t sample_of(std::size_t shard, std::uint64_t position) const {
    return shard + position * shards_;
  }
  void enrol(std::uint64_t batch, std::span<const std::size_t> shards);
  void open(std::size_t shard, Shard&, std::uint64_t epoch, std::uint64_t position) const;
  bool read_next(std::size_t shard, Shard&, std::span<const Tensor> to, std::size_t row) const;
  void turn_round(std::size_t shard, Shard&, std::span<const Tensor> to, std::size_t row) const;
  void read_in_order(std::size_t shard, Shard&, std::uint64_t epoch, std::uint64_t position,
                     std::span<const Tensor> to, std::size_t row) const;
  /// Returns the position of the sample.
  std::uint64_t read_shuffled(std::size_t shard, Shard&, std::uint64_t epoch, std::uint64_t position,
                              std::span<const Tensor> to, std::size_t row) const;
  std::uint64_t window_size(std::uint64_t number) const;
  Window& fill_window(std::size_t shard, Shard&, std::uint64_t epoch, std::uint64_t number,
                      std::uint64_t count, std::span<const Tensor> like) const;

  std::shared_ptr<const IterableDataset> source_;
  std::vector<Field> fields_;
  const std::uint64_t seed_, shards_, samples_per_shard_, buffer_;

  std::mutex mutex_;  // guards next_, the map, and Shard::batches
  std::condition_variable changed_;
  std::uint64_t next_ = 0;  // batch that is enrolled next
  std::map<std::size_t, Shard> by_number_;
};

}  // namespace rz
