#pragma once
/// Assignment of samples to ranks in an epoch, as in torch.utils.data.DistributedSampler.

#include <cstdint>

namespace rz {

/// A permutation of [0, size) that computes each value from (size, key) in O(1) time and memory: a Feistel
/// network over the next even power of two, iterated until the value is inside [0, size) (cycle walking:
/// Black and Rogaway, "Ciphers with arbitrary finite domains", 2002, doi:10.1007/3-540-45760-7_9). Does not
/// reproduce the bits of torch.randperm.
class Permutation {
 public:
  /// Different keys give different permutations.
  Permutation(std::uint64_t size, std::uint64_t key);
  std::uint64_t operator()(std::uint64_t i) const;  ///< i < size

 private:
  std::uint64_t encrypt(std::uint64_t) const;
  std::uint64_t size_, key_, mask_;
  int half_bits_;
};

/// A number that differs for every sample and epoch.
std::uint64_t seed_of_sample(std::uint64_t seed, std::uint64_t epoch, std::uint64_t sample);

struct SamplerOptions {
  std::uint64_t samples = 0;  ///< N
  int ranks = 1;              ///< W
  int rank = 0;               ///< r
  bool shuffle = true;
  bool drop_last = false;
  std::uint64_t seed = 0;
};

/// If drop_last is set and N mod W ≠ 0, each rank gets n = ⌈(N-W)/W⌉ samples, otherwise n = ⌈N/W⌉. The order
/// of an epoch is the permutation seeded with seed + epoch (without shuffle: 0, 1, …), padded cyclically or
/// truncated to nW samples. Rank r takes [r : nW : W]. An index is a pure function of (seed, epoch,
/// position), so resuming costs nothing.
class DistributedSampler {
 public:
  /// Errc::invalid_argument if there are no samples or the rank is out of range.
  explicit DistributedSampler(SamplerOptions);

  std::uint64_t per_rank() const { return per_rank_; }                                            ///< n
  std::uint64_t total() const { return per_rank_ * static_cast<std::uint64_t>(options_.ranks); }  ///< nW
  /// Sample at `position` < per_rank() of this rank in an epoch.
  std::uint64_t index(std::uint64_t epoch, std::uint64_t position) const;
  /// Sample at `position` < total() of the order shared by all ranks.
  std::uint64_t global_index(std::uint64_t epoch, std::uint64_t position) const;

 private:
  SamplerOptions options_;
  std::uint64_t per_rank_ = 0;
};

}  // namespace rz
