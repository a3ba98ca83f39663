#pragma once
/// Inputs whose combination is exactly representable in their dtype, in any order of combining, so that
/// results are compared bit for bit. They repeat after a prime number of elements, so that filling and
/// comparing cost little more than the memory traffic and data that a wrong offset moved is noticed.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "comm/core/types.h"

namespace rz::bench {

class Pattern {
 public:
  static constexpr std::size_t period = 8191;

  /// What rank `rank` of `size` contributes. Every `seed` gives other values.
  static Pattern input(DType, ReduceOp, int rank, int size, std::uint64_t seed);
  /// What the contributions of all ranks combine to.
  static Pattern combined(DType, ReduceOp, int size, std::uint64_t seed);

  /// to[i] = value(from + i).
  void fill(void* to, std::size_t count, std::size_t from = 0) const;
  /// How many of data[i] differ from value(from + i).
  std::size_t wrong(const void* data, std::size_t count, std::size_t from = 0) const;

 private:
  Pattern(DType dtype, int tolerance)
      : dtype_(dtype), tolerance_(tolerance), bytes_(period * size_of(dtype)) {}
  void set(std::size_t i, double value);
  std::size_t wrong_in_run(const std::byte* data, std::size_t first, std::size_t count) const;

  DType dtype_;
  int tolerance_;  // units in the last place: a mean may be a sum times 1/n
  std::vector<std::byte> bytes_;
};

/// The factor of rank `rank` for -o mulsum.
double premul_factor(int rank);

}  // namespace rz::bench
