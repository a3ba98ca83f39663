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

DistributedBatchSampler::DistributedBatchSampler(BatchSamplerOptions options)
    : options_(options), sampler_(of_samples(options)), batches_(batches_of(options, sampler_.per_rank())) {}

BatchSampler::Batch DistributedBatchSampler::at(std::uint64_t epoch, std::uint64_t batch) const {
  const std::uint64_t first = batch * options_.batch_size;
  const std::uint64_t rows = std::min<std::uint64_t>(options_.batch_size, sampler_.per_rank() - first);
  const auto rank = static_cast<std::uint64_t>(options_.rank);
  const auto ranks = static_cast<std::uint64_t>(options_.ranks);
  Batch out;
  for (std::uint64_t position = first; position < first + rows; ++position) {
    out.indices.push_back(sampler_.index(epoch, position));
    out.padding += rank + position * ranks >= options_.samples;
  }
  return out;
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
  const std::uint64_t update = batch / accumulation_, within = batch % accumulation_;
  const std::uint64_t first = ((update * ranks + rank) * accumulation_ + within) * options_.batch_size;
  Batch out;
  for (std::uint64_t position = first; position < first + options_.batch_size; ++position) {
    out.indices.push_back(sampler_.global_index(epoch, position));
    out.padding += position >= options_.samples;
  }
  return out;
}

}  // namespace rz
