#pragma once
/// Threads that read batches ahead into a ring of host memory.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "comm/core/deadline.h"
#include "sharding/data/batch_sampler.h"
#include "sharding/data/dataset.h"
#include "sharding/data/shard_readers.h"
#include "tensor/tensor.h"

namespace rz {

/// A batch in host memory.
struct HostBatch {
  std::vector<Tensor> tensors;  ///< one for each field, with room for batch_size() rows
  BatchSampler::Batch samples;
  std::vector<Shape> shapes;  ///< of a row of each field; rows are contiguous
  std::exception_ptr error;   ///< of reading; the rows are then undefined
};

/// What is read: a dataset, or the shards of a stream.
struct BatchSource {
  std::shared_ptr<const Dataset> dataset;  ///< or null
  std::unique_ptr<ShardReaders> stream;    ///< or null
  std::vector<Field> fields;               ///< fields_of_batches()
  Collation collation;
  std::uint64_t seed = 0;  ///< of BatchRows::draw()
};

/// Reads batches 0, 1, … of an endless run of epochs: batch p is batch p mod B of epoch p / B. The order does
/// not depend on the number of threads. One thread calls the functions.
class Prefetcher {
 public:
  /// Reads into `ring`; `workers` threads, or none: then next() reads.
  Prefetcher(BatchSource, std::shared_ptr<const BatchSampler>, std::vector<HostBatch> ring, int workers);
  /// Ends the threads after the samples that they read now.
  ~Prefetcher();
  Prefetcher(const Prefetcher&) = delete;
  Prefetcher& operator=(const Prefetcher&) = delete;

  /// The next batch, valid until release() was called for it; at most ring.size() - 1 are valid at a time.
  /// Throws the error of reading it, and then the same again until restart(). Errc::timeout.
  const HostBatch& next(Deadline);
  /// Allows the oldest valid batch to be overwritten.
  void release();
  /// Continues at batch `position` of a sampler with batches of the same size; ends the validity of all
  /// batches.
  void restart(std::uint64_t position, std::shared_ptr<const BatchSampler>);
  /// The batch that next() will return.
  std::uint64_t position() const { return taken_; }
  /// The time that next() has spent in waiting for batches, or in reading them.
  std::chrono::nanoseconds waited() const { return waited_; }

 private:
  void work();
  void end() noexcept;
  void read(std::uint64_t position);
  void read_rows(std::uint64_t position, HostBatch&);
  const HostBatch& wait_for_next(Deadline);
  void read_sample(std::uint64_t index, std::uint64_t epoch, const std::vector<Tensor>& to,
                   std::size_t row) const;
  HostBatch& at(std::uint64_t position) { return ring_[position % ring_.size()]; }
  bool ready(std::uint64_t position) const { return ready_[position % ring_.size()] != 0; }
  bool has_work() const { return !cancelled_ && started_ < released_ + ring_.size(); }

  const BatchSource source_;
  std::shared_ptr<const BatchSampler> sampler_;
  std::vector<HostBatch> ring_;
  std::chrono::nanoseconds waited_{};  // used by the calling thread only

  std::mutex mutex_;  // guards everything below, and a batch's content until it is ready
  std::condition_variable work_, progress_;
  std::vector<char> ready_;                               // of each place of the ring
  std::uint64_t released_ = 0, taken_ = 0, started_ = 0;  // positions, each at most the next one
  int busy_ = 0;                                          // workers that read
  bool stopped_ = false;
  std::atomic<bool> cancelled_ = false;  // also read between samples
  std::vector<std::thread> workers_;
};

}  // namespace rz
