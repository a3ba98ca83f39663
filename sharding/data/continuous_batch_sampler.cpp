#include "sharding/data/continuous_batch_sampler.h"

#include <algorithm>

#include "comm/core/error.h"
#include "comm/core/integer_math.h"

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

const EpochStart& ContinuousBatchSampler::start_of(std::uint64_t batch) const {
  return batch >= resumed_.batch ? resumed_ : first_;
}

std::uint64_t ContinuousBatchSampler::left_of_pass(const EpochStart& start) const {
  const std::uint64_t samples = options_.samples - start.samples,
                      ranks = static_cast<std::uint64_t>(options_.ranks);
  return options_.drop_last ? samples / ranks : ceil_div(samples, ranks);
}

LoaderPosition ContinuousBatchSampler::of_rank(const EpochStart& start, std::uint64_t n) const {
  const std::uint64_t ranks = static_cast<std::uint64_t>(options_.ranks), left = left_of_pass(start);
  if (n < left) return {start.epoch, start.samples + n * ranks};
  const std::uint64_t later = n - left;
  return {start.epoch + 1 + later / sampler_->per_rank(), later % sampler_->per_rank() * ranks};
}

LoaderPosition ContinuousBatchSampler::of_all(const EpochStart& start, std::uint64_t n) const {
  return {start.epoch + (start.samples + n) / options_.samples, (start.samples + n) % options_.samples};
}

BatchSampler::Batch ContinuousBatchSampler::at(std::uint64_t epoch, std::uint64_t batch) const {
  const std::uint64_t size = options_.batch_size, of_update = size * options_.accumulation;
  const auto rank = static_cast<std::uint64_t>(options_.rank);
  const auto ranks = static_cast<std::uint64_t>(options_.ranks);
  const std::uint64_t number = epoch * batches() + batch;
  const EpochStart& start = start_of(number);
  const std::uint64_t first = (number - start.batch) * size;  // of this rank's samples
  Batch out;
  for (std::uint64_t n = first; n < first + size; ++n) {
    const LoaderPosition place =
        sampler_ ? of_rank(start, n)
                 : of_all(start, (n / of_update * ranks + rank) * of_update + n % of_update);
    const std::uint64_t position = (place.samples + (sampler_ ? rank : 0)) % options_.samples;
    out.indices.push_back(
        options_.shuffle ? Permutation(options_.samples, options_.seed + place.epoch)(position) : position);
    out.passes.push_back(place.epoch);
  }
  return out;
}

LoaderPosition ContinuousBatchSampler::position(std::uint64_t epoch, std::uint64_t batch) const {
  const std::uint64_t number = epoch * batches() + batch, updates = options_.accumulation;
  const EpochStart& start = start_of(number);
  const std::uint64_t before = number - start.batch;
  const LoaderPosition place = sampler_ ? of_rank(start, before * options_.batch_size)
                                        : of_all(start, before / updates * updates * global_batch_size());
  return place;
}

BatchSampler::Resumed ContinuousBatchSampler::starting_at(const LoaderPosition& to) const {
  const auto ranks = static_cast<std::uint64_t>(options_.ranks);
  auto copy = std::make_shared<ContinuousBatchSampler>(*this);
  EpochStart& start = copy->resumed_;
  start = {.epoch = to.epoch, .samples = std::min(to.samples, options_.samples)};
  if (start.samples == options_.samples || (sampler_ && left_of_pass(start) == 0))
    start.epoch += 1, start.samples = 0;
  // The batch of a run that has always had these ranks and batches.
  const std::uint64_t number =
      sampler_ ? (start.epoch * sampler_->per_rank() + start.samples / ranks) / options_.batch_size
               : (start.epoch * options_.samples + start.samples) / global_batch_size();
  start.batch = number / options_.accumulation * options_.accumulation;
  return {copy, start.batch / batches(), start.batch % batches()};
}

std::uint64_t ContinuousBatchSampler::updates() const {
  const std::uint64_t global =
      options_.batch_size * options_.accumulation * static_cast<std::uint64_t>(options_.ranks);
  return std::max<std::uint64_t>(1, options_.samples / global);
}

}  // namespace rz
