#include "sharding/data/tokens/continuous_batch_sampler.h"

#include <algorithm>

#include "comm/core/error.h"

namespace rz {
namespace {

void check(const ContinuousBatchOptions& o) {
  require(o.samples > 0, Errc::invalid_argument, "the sampler was given no samples");
  require(o.batch_size > 0 && o.accumulation > 0, Errc::invalid_argument, "batches of ", o.batch_size,
          " samples, ", o.accumulation, " an update; both are at least 1");
  require(o.ranks > 0 && o.rank >= 0 && o.rank < o.ranks, Errc::invalid_argument,
          "the sampler was given rank ", o.rank, " of ", o.ranks);
}

}  // namespace

ContinuousBatchSampler::ContinuousBatchSampler(ContinuousBatchOptions options) : options_(options) {
  check(options);
  if (options.shuffle && !options.consecutive)
    sampler_.emplace(SamplerOptions{.samples = options.samples,
                                    .ranks = options.ranks,
                                    .rank = options.rank,
                                    .shuffle = true,
                                    .drop_last = options.drop_last,
                                    .seed = options.seed});
  require(!sampler_ || sampler_->per_rank() > 0, Errc::invalid_argument, options.samples,
          " samples are too few for ", options.ranks,
          " ranks; give more data, or set drop_last to false (dataloader_drop_last)");
}

std::uint64_t ContinuousBatchSampler::sample_at(std::uint64_t position) const {
  const std::uint64_t epoch = position / options_.samples, i = position % options_.samples;
  return options_.shuffle ? Permutation(options_.samples, options_.seed + epoch)(i) : i;
}

BatchSampler::Batch ContinuousBatchSampler::at(std::uint64_t epoch, std::uint64_t batch) const {
  const std::uint64_t size = options_.batch_size, of_rank = size * options_.accumulation;
  const std::uint64_t first = (epoch * batches() + batch) * size;  // of this rank's samples
  const auto rank = static_cast<std::uint64_t>(options_.rank);
  const auto ranks = static_cast<std::uint64_t>(options_.ranks);
  Batch out;
  for (std::uint64_t position = first; position < first + size; ++position) {
    if (sampler_) {
      out.indices.push_back(
          sampler_->index(position / sampler_->per_rank(), position % sampler_->per_rank()));
    } else {
      const std::uint64_t update = position / of_rank;
      out.indices.push_back(sample_at((update * ranks + rank) * of_rank + position % of_rank));
    }
  }
  return out;
}

std::uint64_t ContinuousBatchSampler::updates() const {
  const std::uint64_t global =
      options_.batch_size * options_.accumulation * static_cast<std::uint64_t>(options_.ranks);
  return std::max<std::uint64_t>(1, options_.samples / global);
}

}  // namespace rz
