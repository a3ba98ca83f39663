#include "tensor/box.h"

namespace rz {

bool Box::is_valid() const {
  bool valid = offset.size() == shape.size() && extent.size() == shape.size();
  for (std::size_t d = 0; valid && d < shape.size(); ++d)
    valid = offset[d] <= shape[d] && extent[d] <= shape[d] - offset[d];
  return valid;
}

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

std::uint64_t Box::index(std::uint64_t element) const {
  std::uint64_t index = 0, stride = 1;
  for (std::size_t d = extent.size(); d-- > 0; element /= extent[d], stride *= shape[d])
    index += (offset[d] + element % extent[d]) * stride;
  return index;
}

std::uint64_t Box::run_count() const {
  std::uint64_t run = 1;
  for (std::size_t d = extent.size(); d-- > 0;) {
    run *= extent[d];
    if (extent[d] != shape[d]) break;
  }
  return run;
}

std::vector<std::uint64_t> extents(const Shape& shape) {
  std::vector<std::uint64_t> all;
  for (int d = 0; d < shape.dims(); ++d) all.push_back(shape[d]);
  return all;
}

}  // namespace rz
