#pragma once
/// Inputs whose reduction is exactly representable in their dtype, in any order of summation, so that results
/// can be compared bit for bit. Values repeat with a prime period: filling and comparing cost little more
/// than the memory traffic, and data moved by a wrong offset is detected.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "comm/core/types.h"

namespace rz::bench {

class Pattern {
 public:
  static constexpr std::size_t period = 8191;

  /// The input of rank `rank` of `size`. Each `seed` gives different values.
  static Pattern input(DType, ReduceOp, int rank, int size, std::uint64_t seed);
  /// The reduction of the inputs of all ranks.
  static Pattern combined(DType, ReduceOp, int size, std::uint64_t seed);

  /// to[i] = value(from + i).
  void fill(void* to, std::size_t count, std::size_t from = 0) const;
  /// The number of data[i] that differ from value(from + i).
  std::size_t wrong(const void* data, std::size_t count, std::size_t from = 0) const;

 private:
  Pattern(DType dtype, int tolerance)
      : dtype_(dtype), tolerance_(tolerance), bytes_(period * size_of(dtype)) {}
  void set(std::size_t i, double value);
  std::size_t wrong_in_run(const std::byte* data, std::size_t first, std::size_t count) const;

  DType dtype_;
  int tolerance_;  // units in the last place; nonzero since a mean may be a sum times 1/n
  std::vector<std::byte> bytes_;
};

/// The factor of rank `rank` for -o mulsum.
double premul_factor(int rank);

}  // namespace rz::bench
