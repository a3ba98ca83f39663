#include "sharding/data/prefetcher.h"

#include <utility>

#include "comm/core/error.h"
#include "comm/os/helper_thread.h"
#include "sharding/data/collation.h"

namespace rz {

Prefetcher::Prefetcher(BatchSource source, std::shared_ptr<const BatchSampler> sampler,
                       std::vector<HostBatch> ring, int workers)
    : source_(std::move(source)), sampler_(std::move(sampler)), ring_(std::move(ring)), ready_(ring_.size()) {
  try {
    for (int i = 0; i < workers; ++i) workers_.push_back(helper_thread([this] { work(); }));
  } catch (...) {
    end();
    throw;
  }
}

Prefetcher::~Prefetcher() { end(); }

void Prefetcher::end() noexcept {
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
    cancelled_ = true;
  }
  work_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void Prefetcher::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    work_.wait(lock, [&] { return stopped_ || has_work(); });
    if (stopped_) return;
    const std::uint64_t position = started_++;
    ++busy_;
    lock.unlock();
    read(position);
    lock.lock();
    --busy_;
    ready_[position % ring_.size()] = 1;
    progress_.notify_all();
  }
}

void Prefetcher::read(std::uint64_t position) {
  HostBatch& to = at(position);
  to.error = nullptr;
  try {
    read_rows(position, to);
  } catch (...) {
    to.error = std::current_exception();
  }
  if (source_.stream) source_.stream->skip(position);
}

void Prefetcher::read_rows(std::uint64_t position, HostBatch& to) {
  const std::uint64_t batches = sampler_->batches();
  to.samples = sampler_->at(position / batches, position % batches);
  require(to.samples.indices.size() <= sampler_->batch_size(), Errc::invalid_argument, "batch ",
          position % batches, " of epoch ", position / batches, " has ", to.samples.indices.size(),
          " samples, more than the sampler's batch_size ", sampler_->batch_size());
  const std::vector<std::uint64_t>& passes = to.samples.passes;
  require(passes.empty() || passes.size() == to.samples.indices.size(), Errc::invalid_argument, "a batch of ",
          to.samples.indices.size(), " samples with the passes of ", passes.size());
  const std::size_t count = to.samples.indices.size();
  if (source_.stream)
    source_.stream->read(position, position / batches, to.samples, to.tensors, cancelled_);
  else
    for (std::size_t row = 0; row < count && !cancelled_; ++row)
      read_sample(to.samples.indices[row], passes.empty() ? position / batches : passes[row], to.tensors,
                  row);
  if (!cancelled_) to.shapes = collate(source_.fields, to.tensors, count, source_.collation);
}

void Prefetcher::read_sample(std::uint64_t index, std::uint64_t epoch, const std::vector<Tensor>& to,
                             std::size_t row) const {
  const Dataset& dataset = *source_.dataset;
  require(index < dataset.size(), Errc::invalid_argument, "sample ", index, ": the dataset has ",
          dataset.size(), "; make the sampler for as many");
  clear_lengths(source_.fields, to, row);
  BatchRows rows(source_.fields, to, {.epoch = epoch, .seed = seed_of_sample(source_.seed, epoch, index)});
  try {
    dataset.read(index, rows, row);
  } catch (const Error& e) {
    throw Error(e.code(), concat("sample ", index, ": ", e.what()), e.culprit());
  } catch (const std::exception& e) {
    fail(Errc::io, "sample ", index, ": ", e.what());
  }
}

const HostBatch& Prefetcher::next(Deadline deadline) {
  struct Waiting {
    std::chrono::nanoseconds& total;
    std::chrono::steady_clock::time_point start = std::chrono::steady_clock::now();
    ~Waiting() { total += std::chrono::steady_clock::now() - start; }
  } waiting{waited_};
  return wait_for_next(deadline);
}

const HostBatch& Prefetcher::wait_for_next(Deadline deadline) {
  std::unique_lock lock(mutex_);
  if (workers_.empty() && !ready(taken_)) {
    read(taken_);
    started_ = taken_ + 1;
    ready_[taken_ % ring_.size()] = 1;
  }
  require(progress_.wait_until(lock, deadline.at(), [&] { return ready(taken_); }), Errc::timeout, "batch ",
          taken_ % sampler_->batches(), " of epoch ", taken_ / sampler_->batches(),
          " was not read in time; raise LoaderOptions::timeout if reading takes that long");
  const HostBatch& batch = at(taken_);
  if (batch.error) std::rethrow_exception(batch.error);
  ++taken_;
  return batch;
}

void Prefetcher::release() {
  {
    const std::lock_guard lock(mutex_);
    ready_[released_ % ring_.size()] = 0;
    ++released_;
  }
  work_.notify_one();
}

void Prefetcher::restart(std::uint64_t position, std::shared_ptr<const BatchSampler> sampler) {
  {
    std::unique_lock lock(mutex_);
    cancelled_ = true;
    progress_.wait(lock, [&] { return busy_ == 0; });
    sampler_ = std::move(sampler);
    if (source_.stream) source_.stream->restart(position);
    released_ = taken_ = started_ = position;
    ready_.assign(ring_.size(), 0);
    cancelled_ = false;
  }
  work_.notify_all();
}

}  // namespace rz
