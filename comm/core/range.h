#pragma once
/// Ranges of elements or bytes, and places of ranks.

#include <algorithm>
#include <cstddef>

namespace rz {

/// [begin, end).
struct Range {
  std::size_t begin = 0, end = 0;
  std::size_t count() const { return end - begin; }
  bool operator==(const Range&) const = default;
};

/// Intersection of two ranges; begin == end if it is empty.
constexpr Range intersect(Range a, Range b) {
  const std::size_t begin = std::max(a.begin, b.begin);
  return {begin, std::max(begin, std::min(a.end, b.end))};
}

/// A rank of a group.
struct RankOf {
  int rank = 0, ranks = 1;
  bool operator==(const RankOf&) const = default;
};

}  // namespace rz
