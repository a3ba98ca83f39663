#pragma once
/// Ranges of elements or bytes.

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

}  // namespace rz
