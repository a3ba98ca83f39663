#include "sharding/data/batch_sampler.h"

#include <algorithm>

#include "comm/core/error.h"
#include "comm/core/integer_math.h"

namespace rz {
namespace {

SamplerOptions of_samples(const BatchSamplerOptions& o) {
  return {.samples = o.samples, .ranks = o.ranks, .rank = o.rank, .shuffle = o.shuffle, .seed = o.seed};
}

std::uint64_t batches_of(const BatchSamplerOptions& o, std::uint64_t samples) {
  require(o.batch_size > 0, Errc::invalid_argument, "a batch of no samples; batch_size is at least 1");
  if (!o.drop_last) return ceil_div(samples, std::uint64_t{o.batch_size});
  require(samples >= o.batch_size, Errc::invalid_argument, o.samples, " samples on ", o.ranks,
          " ranks are less than one batch of ", o.batch_size,
          "; give more data or a smaller batch, or set drop_last to false");
  return samples / o.batch_size;
}

}  // namespace

std::string order_of_samples(std::uint64_t samples, bool shuffle, std::uint64_t seed) {
  return concat(samples, samples == 1 ? " sample" : " samples",
                shuffle ? concat(", shuffled with seed ", seed) : ", in order");
}

LoaderPosition BatchSampler::position(std::uint64_t epoch, std::uint64_t batch) const {
  return {epoch, batch * global_batch_size()};
}

BatchSampler::Resumed BatchSampler::starting_at(const LoaderPosition& to) const {
  const std::uint64_t batch = to.samples / global_batch_size();
  if (batch >= batches()) return {nullptr, to.epoch + 1, 0};
  return {nullptr, to.epoch, batch};
}

DistributedBatchSampler::DistributedBatchSampler(BatchSamplerOptions options)
    : options_(options), sampler_(of_samples(options)), batches_(batches_of(options, sampler_.per_rank())) {}

BatchSampler::Batch DistributedBatchSampler::at(std::uint64_t epoch, std::uint64_t batch) const {
  const auto rank = static_cast<std::uint64_t>(options_.rank),
             ranks = static_cast<std::uint64_t>(options_.ranks);
  const auto [before, number] = start_.of(epoch, batch);
  const std::uint64_t first = number * options_.batch_size;
  const std::uint64_t of_rank = ceil_div(options_.samples - before, ranks);
  const std::uint64_t rows = std::min<std::uint64_t>(options_.batch_size, of_rank - first);
  Batch out;
  for (std::uint64_t row = first; row < first + rows; ++row) {
    const std::uint64_t position = before + rank + row * ranks;
    out.indices.push_back(sampler_.global_index(epoch, position));
    out.padding += position >= options_.samples;
  }
  return out;
}

LoaderPosition DistributedBatchSampler::position(std::uint64_t epoch, std::uint64_t batch) const {
  const auto [before, number] = start_.of(epoch, batch);
  return {epoch, before + number * global_batch_size()};
}

namespace {

/// A copy of a sampler that goes on after these samples with the last `left` batches of the epoch.
template <class Sampler>
BatchSampler::Resumed resumed_after(const Sampler& sampler, EpochStart Sampler::*start,
                                    const LoaderPosition& to, std::uint64_t left) {
  if (left == 0) return {nullptr, to.epoch + 1, 0};
  auto copy = std::make_shared<Sampler>(sampler);
  (*copy).*start = {to.epoch, sampler.batches() - left, to.samples};
  return {copy, to.epoch, sampler.batches() - left};
}

}  // namespace

BatchSampler::Resumed DistributedBatchSampler::starting_at(const LoaderPosition& to) const {
  const std::uint64_t samples = options_.samples - std::min(to.samples, options_.samples);
  const std::uint64_t of_rank = ceil_div(samples, static_cast<std::uint64_t>(options_.ranks));
  const std::uint64_t size = options_.batch_size;
  return resumed_after(*this, &DistributedBatchSampler::start_, to,
                       options_.drop_last ? of_rank / size : ceil_div(of_rank, size));
}

namespace {

std::uint64_t updates_of(const BatchSamplerOptions& o, std::uint64_t accumulation) {
  require(o.batch_size > 0 && accumulation > 0, Errc::invalid_argument, "batches of ", o.batch_size,
          " samples, ", accumulation, " an update; both are at least 1");
  const std::uint64_t of_update = o.batch_size * accumulation * static_cast<std::uint64_t>(o.ranks);
  if (!o.drop_last) return ceil_div(o.samples, of_update);
  require(o.samples >= of_update, Errc::invalid_argument, o.samples, " samples are less than one update of ",
          of_update, "; give more data or a smaller batch, or set drop_last to false");
  return o.samples / of_update;
}

}  // namespace

ConsecutiveBatchSampler::ConsecutiveBatchSampler(BatchSamplerOptions options, std::size_t accumulation)
    : options_(options),
      accumulation_(accumulation),
      sampler_(of_samples(options)),
      updates_(updates_of(options, accumulation)) {}

BatchSampler::Batch ConsecutiveBatchSampler::at(std::uint64_t epoch, std::uint64_t batch) const {
  const auto rank = static_cast<std::uint64_t>(options_.rank),
             ranks = static_cast<std::uint64_t>(options_.ranks);
  const auto [before, number] = start_.of(epoch, batch);
  const std::uint64_t update = number / accumulation_, within = number % accumulation_;
  const std::uint64_t first =
      before + ((update * ranks + rank) * accumulation_ + within) * options_.batch_size;
  Batch out;
  for (std::uint64_t position = first; position < first + options_.batch_size; ++position) {
    out.indices.push_back(sampler_.global_index(epoch, position));
    out.padding += position >= options_.samples;
  }
  return out;
}

LoaderPosition ConsecutiveBatchSampler::position(std::uint64_t epoch, std::uint64_t batch) const {
  const auto [before, number] = start_.of(epoch, batch);
  return {epoch, before + number / accumulation_ * accumulation_ * global_batch_size()};
}

BatchSampler::Resumed ConsecutiveBatchSampler::starting_at(const LoaderPosition& to) const {
  const std::uint64_t samples = options_.samples - std::min(to.samples, options_.samples);
  const std::uint64_t of_update = accumulation_ * global_batch_size();
  const std::uint64_t left = options_.drop_last ? samples / of_update : ceil_div(samples, of_update);
  return resumed_after(*this, &ConsecutiveBatchSampler::start_, to, left * accumulation_);
}

}  // namespace rz
