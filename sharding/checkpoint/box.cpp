#include "sharding/checkpoint/box.h"

namespace rz {

std::uint64_t Box::count() const {
  std::uint64_t n = 1;
  for (const std::uint64_t e : extent) n *= e;
  return n;
}

bool Box::overlaps(const Box& other) const {
  for (std::size_t d = 0; d < extent.size(); ++d)
    if (offset[d] + extent[d] <= other.offset[d] || other.offset[d] + other.extent[d] <= offset[d])
      return false;
  return count() > 0 && other.count() > 0;
}

std::uint64_t Box::index_in(const std::vector<std::uint64_t>& shape, std::uint64_t element) const {
  std::uint64_t index = 0, stride = 1;
  for (std::size_t d = extent.size(); d-- > 0; element /= extent[d], stride *= shape[d])
    index += (offset[d] + element % extent[d]) * stride;
  return index;
}

std::uint64_t Box::row_count(const std::vector<std::uint64_t>& shape) const {
  std::uint64_t row = 1;
  for (std::size_t d = extent.size(); d-- > 0;) {
    row *= extent[d];
    if (extent[d] != shape[d]) break;
  }
  return row;
}

}  // namespace rz
