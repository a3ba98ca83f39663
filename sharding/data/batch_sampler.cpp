#include "sharding/data/batch_sampler.h"

#include <algorithm>
#include <bit>

#include "comm/core/error.h"
#include "comm/core/integer_math.h"

namespace rz {
namespace {

/// The finaliser of SplitMix64 (Steele et al., 2014, doi:10.1145/2660193.2660195).
std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace

Permutation::Permutation(std::uint64_t size, std::uint64_t key) : size_(size), key_(mix(key)) {
  require(size > 0, Errc::invalid_argument, "a permutation of no elements");
  half_bits_ = std::max(1, (static_cast<int>(std::bit_width(size - 1)) + 1) / 2);
  mask_ = (std::uint64_t{1} << half_bits_) - 1;
}

std::uint64_t Permutation::encrypt(std::uint64_t x) const {
  std::uint64_t left = x >> half_bits_, right = x & mask_;
  for (std::uint64_t round = 0; round < 6; ++round) {
    const std::uint64_t next = left ^ (mix(key_ ^ mix(round << 32 ^ right)) & mask_);
    left = right, right = next;
  }
  return left << half_bits_ | right;
}

std::uint64_t Permutation::operator()(std::uint64_t i) const {
  // The domain is smaller than four times the size, so the loop takes under four steps on average.
  do i = encrypt(i);
  while (i >= size_);
  return i;
}

std::uint64_t seed_of_sample(std::uint64_t seed, std::uint64_t epoch, std::uint64_t sample) {
  return mix(mix(mix(seed) ^ epoch) ^ sample);
}

DistributedSampler::DistributedSampler(SamplerOptions options) : options_(options) {
  require(options.samples > 0, Errc::invalid_argument, "the sampler was given no samples");
  require(options.ranks > 0 && options.rank >= 0 && options.rank < options.ranks, Errc::invalid_argument,
          "the sampler was given rank ", options.rank, " of ", options.ranks);
  const auto ranks = static_cast<std::uint64_t>(options.ranks);
  const bool cut = options.drop_last && options.samples % ranks != 0;
  // ⌈(N-W)/W⌉ is ⌊N/W⌋ if W does not divide N.
  per_rank_ = cut ? options.samples / ranks : ceil_div(options.samples, ranks);
}

std::uint64_t DistributedSampler::global_index(std::uint64_t epoch, std::uint64_t position) const {
  const std::uint64_t i = position % options_.samples;
  return options_.shuffle ? Permutation(options_.samples, options_.seed + epoch)(i) : i;
}

std::uint64_t DistributedSampler::index(std::uint64_t epoch, std::uint64_t position) const {
  const auto ranks = static_cast<std::uint64_t>(options_.ranks);
  return global_index(epoch, static_cast<std::uint64_t>(options_.rank) + position * ranks);
}

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
