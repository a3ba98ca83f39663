#pragma once
/// The work of one rank in each variant.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "bench/lower_bound/pair.h"
#include "bench/lower_bound/variants.h"

namespace rz::bench::lower_bound {

/// The memory accessed by one rank. All pointers are aligned to 64 bytes; `slots` has slot_bytes bytes.
struct RankMemory {
  static constexpr std::size_t slot_bytes = std::size_t{16} << 20;
  float *in, *out;
  float *mapped_in[2], *mapped_out[2];
  std::byte* slots;
  PeerBuffers peer;
};

/// Runs all_reduces of two ranks; each rank has one Kernel.
class Kernel {
 public:
  Kernel(PairRank& self, const RankMemory& memory) : self_(self), memory_(memory) {}

  /// Runs one all_reduce of `count` floats on this rank; the peer must make the same call. In place, `out` is
  /// the input. Calls of different variants must be separated by a barrier of both ranks.
  void all_reduce(const Variant&, std::size_t count);

 private:
  void lines(float* in, std::size_t count);
  void one_shot(const Variant&, float* in, std::size_t count);
  void two_phase(const Variant&, float* in, std::size_t count);
  void single_copy(const Variant&, std::size_t count);
  void mapped(const Variant&, std::size_t count);
  float* slot(int rank, int kind, std::uint64_t number, std::size_t piece) const;

  PairRank& self_;
  const RankMemory memory_;
  std::vector<float> piece_;
  std::uint64_t lines_ = 0, mapped_ = 0, one_shots_ = 0, pieces_ = 0;
  std::uint64_t copied_ = 0, reduced_ = 0, gathered_ = 0;  // pieces of two_phase
};

}  // namespace rz::bench::lower_bound
