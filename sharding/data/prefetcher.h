#pragma once
/// Threads that read batches ahead into a ring of host memory.

#include <atomic>
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
#include "tensor/tensor.h"

namespace rz {

/// A batch in host memory.
struct HostBatch {
  std::vector<Tensor> tensors;  ///< one for each field, of batch_size() rows
  BatchSampler::Batch samples;
  std::exception_ptr error;  ///< of reading; the rows are then undefined
};

/// Reads batches 0, 1, … of an endless run of epochs: batch p is batch p mod B of epoch p / B. The order does
/// not depend on the number of threads. One thread calls the functions.
class Prefetcher {
 public:
  /// Reads into `ring`; `workers` threads, or none: then next() reads. `seed`: of BatchRows::draw().
  Prefetcher(std::shared_ptr<const Dataset>, std::shared_ptr<const BatchSampler>, std::vector<HostBatch> ring,
             int workers, std::uint64_t seed);
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

 private:
  void work();
  void end() noexcept;
  void read(std::uint64_t position);
  void read_rows(std::uint64_t position, HostBatch&);
  void read_sample(std::uint64_t index, std::uint64_t epoch, const std::vector<Tensor>& to,
                   std::size_t row) const;
  HostBatch& at(std::uint64_t position) { return ring_[position % ring_.size()]; }
  bool ready(std::uint64_t position) const { return ready_[position % ring_.size()] != 0; }
  bool has_work() const { return !cancelled_ && started_ < released_ + ring_.size(); }

  std::shared_ptr<const Dataset> dataset_;
  std::shared_ptr<const BatchSampler> sampler_;
  std::vector<Field> fields_;
  std::vector<HostBatch> ring_;
  const std::uint64_t seed_;

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
