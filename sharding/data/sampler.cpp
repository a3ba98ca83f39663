#include "sharding/data/sampler.h"

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

}  // namespace rz
