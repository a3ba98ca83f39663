#pragma once
/// Which samples a rank trains on in an epoch: as torch's DistributedSampler shares them out.

#include <cstdint>

namespace rz {

/// A permutation of [0, size) whose every value is a pure function of (size, key), found in O(1) time and
/// memory: a Feistel network over the next even power of two, walked along its cycle until it lands inside
/// [0, size) (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002, doi:10.1007/3-540-45760-7_9).
/// Not torch.randperm's bits.
class Permutation {
 public:
  Permutation(std::uint64_t size, std::uint64_t key);
  std::uint64_t operator()(std::uint64_t i) const;  ///< i < size

 private:
  std::uint64_t encrypt(std::uint64_t) const;
  std::uint64_t size_, key_, mask_;
  int half_bits_;
};

struct SamplerOptions {
  std::uint64_t samples = 0;  ///< N
  int ranks = 1;              ///< W
  int rank = 0;               ///< r
  bool shuffle = true;
  bool drop_last = false;
  std::uint64_t seed = 0;
};

/// drop_last and N mod W ≠ 0: n = ⌈(N-W)/W⌉ samples a rank, else n = ⌈N/W⌉; nW in all. The epoch's order is
/// the permutation seeded with seed + epoch (or 0, 1, …), padded from its head, again and again if need be,
/// or cut; the rank takes [r : nW : W]. The index is a pure function of (seed, epoch, position): resuming
/// costs nothing.
class DistributedSampler {
 public:
  /// Errc::invalid_argument for no samples, or a rank that is not one of the ranks.
  explicit DistributedSampler(SamplerOptions);

  std::uint64_t per_rank() const { return per_rank_; }                                            ///< n
  std::uint64_t total() const { return per_rank_ * static_cast<std::uint64_t>(options_.ranks); }  ///< nW
  /// Position < per_rank() of this rank in an epoch.
  std::uint64_t index(std::uint64_t epoch, std::uint64_t position) const;
  /// Position < total() of the order that all ranks share.
  std::uint64_t global_index(std::uint64_t epoch, std::uint64_t position) const;

 private:
  SamplerOptions options_;
  std::uint64_t per_rank_ = 0;
};

}  // namespace rz
