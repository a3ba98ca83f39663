#include "autograd_lite/slice.h"

#include <span>

namespace rz {

Slice::Slice(const Shape& global) : global_(global) {
  for (int d = 0; d < global.dims(); ++d) intervals_[static_cast<std::size_t>(d)] = {0, global[d]};
}

Slice::Slice(const Shape& global, std::initializer_list<Interval> intervals) : global_(global) {
  require(intervals.size() == static_cast<std::size_t>(global.dims()), Errc::invalid_argument, "a slice has ",
          intervals.size(), " intervals, the tensor ", global.dims(), " dimensions; give one a dimension");
  std::ranges::copy(intervals, intervals_.begin());
  for (int d = 0; d < global.dims(); ++d) {
    const Interval& i = (*this)[d];
    require(i.begin <= i.end && i.end <= global[d], Errc::invalid_argument, "a slice has indices ", i.begin,
            " to ", i.end, " in dimension ", d, ", which has ", global[d]);
  }
}

Shape Slice::shape() const {
  std::array<std::size_t, 4> extents{};
  for (std::size_t d = 0; d < extents.size(); ++d) extents[d] = intervals_[d].count();
  return Shape(std::span<const std::size_t>(extents.data(), static_cast<std::size_t>(global_.dims())));
}

std::size_t Slice::global_index(std::size_t element) const {
  std::size_t index = 0, stride = 1;
  for (int d = global_.dims() - 1; d >= 0; --d) {
    const Interval& i = (*this)[d];
    index += (i.begin + element % i.count()) * stride;
    element /= i.count();
    stride *= global_[d];
  }
  return index;
}

}  // namespace rz
