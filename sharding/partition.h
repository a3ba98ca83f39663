#pragma once
/// Who owns which elements.

#include <cstddef>

namespace rz {

struct Range {
  std::size_t begin = 0, end = 0;
  std::size_t count() const { return end - begin; }
  bool operator==(const Range&) const = default;
};

/// Part `rank` of `size` of `count` elements, which `size` divides.
Range part(std::size_t count, int rank, int size);

}  // namespace rz
