#include "sharding/data/shard_readers.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>

#include "comm/core/error.h"
#include "sharding/data/collation.h"

namespace rz {

ShardReaders::ShardReaders(std::shared_ptr<const IterableDataset> source, std::vector<Field> fields,
                           std::uint64_t seed, std::size_t buffer)
    : source_(std::move(source)),
      fields_(std::move(fields)),
      seed_(seed),
      shards_(source_->shards()),
      samples_per_shard_(source_->samples_per_shard()),
      buffer_(std::min<std::uint64_t>(buffer, samples_per_shard_)) {}

void ShardReaders::restart(std::uint64_t batch) {
  const std::lock_guard lock(mutex_);
  next_ = batch;
}

void ShardReaders::enrol(std::uint64_t batch, std::span<const std::size_t> shards) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return next_ == batch; });
  for (const std::size_t s : shards) by_number_[s].batches.push_back(batch);
  ++next_;
  changed_.notify_all();
}

void ShardReaders::skip(std::uint64_t batch) {
  {
    const std::lock_guard lock(mutex_);
    if (next_ > batch) return;
  }
  enrol(batch, {});
}

/// A batch's turn among those that read the same shards; it ends for all of them.
class ShardReaders::Turn {
 public:
  Turn(ShardReaders& all, std::uint64_t batch, std::vector<std::size_t> shards)
      : all_(all), batch_(batch), shards_(std::move(shards)) {
    all_.enrol(batch_, shards_);
  }
  ~Turn() {
    for (const std::size_t s : shards_) end(s);
  }
  Turn(const Turn&) = delete;

  Shard& begin(std::size_t shard) {
    std::unique_lock lock(all_.mutex_);
    Shard& s = all_.by_number_.at(shard);
    all_.changed_.wait(lock, [&] { return s.batches.front() == batch_; });
    return s;
  }
  void end(std::size_t shard) {
    const std::lock_guard lock(all_.mutex_);
    if (std::erase(all_.by_number_.at(shard).batches, batch_) > 0) all_.changed_.notify_all();
  }

 private:
  ShardReaders& all_;
  const std::uint64_t batch_;
  const std::vector<std::size_t> shards_;
};

void ShardReaders::read(std::uint64_t batch, std::uint64_t epoch, BatchSampler::Batch& samples,
                        std::span<const Tensor> to, const std::atomic<bool>& cancelled) {
  std::map<std::size_t, std::vector<std::size_t>> rows;  // of each shard, in the order of its samples
  for (std::size_t row = 0; row < samples.indices.size(); ++row)
    rows[samples.indices[row] % shards_].push_back(row);
  std::vector<std::size_t> shards;
  for (const auto& [shard, unused] : rows) shards.push_back(shard);
  Turn turn(*this, batch, shards);
  for (const auto& [number, of_shard] : rows) {
    Shard& shard = turn.begin(number);
    for (const std::size_t row : of_shard) {
      if (cancelled) return;
      std::uint64_t position = samples.indices[row] / shards_;
      const std::uint64_t pass = samples.passes.empty() ? epoch : samples.passes[row];
      try {
        if (buffer_ > 1)
          position = read_shuffled(number, shard, pass, position, to, row);
        else
          read_in_order(number, shard, pass, position, to, row);
      } catch (...) {
        shard.reader.reset();
        throw;
      }
      samples.indices[row] = sample_of(number, position);
    }
    turn.end(number);
  }
}

// ---- one shard

void ShardReaders::open(std::size_t number, Shard& shard, std::uint64_t epoch, std::uint64_t position) const {
  if (shard.epoch != epoch) shard.length.reset();
  shard.reader.reset();
  shard.epoch = epoch;
  shard.next = position;
  shard.opened = shard.length ? position % *shard.length : position;
  shard.begin = position - shard.opened;
  shard.reader = source_->open(number, epoch, shard.opened);
  require(shard.reader != nullptr, Errc::invalid_argument, "IterableDataset::open() has returned no reader");
}

bool ShardReaders::read_next(std::size_t number, Shard& shard, std::span<const Tensor> to,
                             std::size_t row) const {
  const std::uint64_t sample = sample_of(number, shard.next);
  clear_lengths(fields_, to, row);
  BatchRows rows(fields_, to, {.epoch = shard.epoch, .seed = seed_of_sample(seed_, shard.epoch, sample)});
  if (!shard.reader->read(rows, row)) return false;
  ++shard.next;
  return true;
}

/// The reader is at the end of the shard, which begins again.
void ShardReaders::turn_round(std::size_t number, Shard& shard, std::span<const Tensor> to,
                              std::size_t row) const {
  const std::uint64_t position = shard.next, end = position - shard.begin;
  require(!shard.length || end == *shard.length, Errc::invalid_argument, "the shard ends with sample ", end,
          "; it had ", shard.length.value_or(0), " before");
  std::uint64_t length = end;
  if (end == shard.opened && end > 0) {  // it may have ended before
    open(number, shard, shard.epoch, 0);
    while (read_next(number, shard, to, row)) {
    }
    length = shard.next;
  }
  require(length > 0, Errc::invalid_argument, "the shard has no samples");
  shard.length = length;
  open(number, shard, shard.epoch, position);
}

void ShardReaders::read_in_order(std::size_t number, Shard& shard, std::uint64_t epoch,
                                 std::uint64_t position, std::span<const Tensor> to, std::size_t row) const {
  try {
    if (!shard.reader || shard.epoch != epoch || shard.next > position) open(number, shard, epoch, position);
    while (shard.next <= position)
      if (!read_next(number, shard, to, row)) turn_round(number, shard, to, row);
  } catch (const Error& e) {
    throw Error(e.code(), concat("shard ", number, ", sample ", shard.next, ": ", e.what()), e.culprit());
  } catch (const std::exception& e) {
    fail(Errc::io, "shard ", number, ", sample ", shard.next, ": ", e.what());
  }
}

// ---- shuffled

std::uint64_t ShardReaders::window_size(std::uint64_t number) const {
  return std::min(buffer_, samples_per_shard_ - std::min(samples_per_shard_, number * buffer_));
}

ShardReaders::Window& ShardReaders::fill_window(std::size_t shard_number, Shard& shard, std::uint64_t epoch,
                                                std::uint64_t number, std::uint64_t count,
                                                std::span<const Tensor> like) const {
  Window& window = shard.windows[number % 2];
  if (window.memory.empty())
    for (const Tensor& t : like)
      window.memory.push_back(Tensor::empty(t.shape().with(0, buffer_), t.dtype()));
  if (window.epoch != epoch || window.number != number) {
    window.epoch = epoch, window.number = number;
    window.filled = 0;
    window.errors.clear();
  }
  for (; window.filled < count; ++window.filled) {
    try {
      read_in_order(shard_number, shard, epoch, number * buffer_ + window.filled, window.memory,
                    window.filled);
    } catch (...) {
      shard.reader.reset();
      window.errors[window.filled] = std::current_exception();
    }
  }
  return window;
}

std::uint64_t ShardReaders::read_shuffled(std::size_t number, Shard& shard, std::uint64_t epoch,
                                          std::uint64_t position, std::span<const Tensor> to,
                                          std::size_t row) const {
  const std::uint64_t of = position / buffer_, within = position % buffer_, size = window_size(of);
  Window& window = fill_window(number, shard, epoch, of, size, to);
  fill_window(number, shard, epoch, of + 1, std::min(within + 1, window_size(of + 1)), to);
  const auto from = static_cast<std::size_t>(
      Permutation(size, seed_of_sample(seed_, epoch, sample_of(number, of)))(within));
  if (const auto error = window.errors.find(from); error != window.errors.end()) {
    const std::exception_ptr thrown = error->second;
    window.filled = 0;
    window.errors.clear();
    std::rethrow_exception(thrown);
  }
  for (std::size_t f = 0; f < to.size(); ++f) {
    const std::size_t bytes = to[f].bytes() / to[f].shape()[0];
    std::memcpy(to[f].raw() + row * bytes, window.memory[f].raw() + from * bytes, bytes);
  }
  return of * buffer_ + from;
}

}  // namespace rz
