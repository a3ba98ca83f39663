#pragma once
/// Parts of tensors that are split over ranks along their dimensions (tensor parallelism).

#include <algorithm>
#include <array>
#include <cstddef>
#include <initializer_list>

#include "tensor/tensor.h"

namespace rz {

/// Indices [begin, end) of a dimension.
struct Interval {
  std::size_t begin = 0, end = 0;
  std::size_t count() const { return end - begin; }
  bool operator==(const Interval&) const = default;
};

/// The part of a global tensor within one interval a dimension. Elements of tensor and part are numbered in
/// row-major order.
class Slice {
 public:
  /// The whole tensor.
  explicit Slice(const Shape& global);
  /// Errc::invalid_argument unless there is one interval a dimension, within it.
  Slice(const Shape& global, std::initializer_list<Interval>);

  const Shape& global_shape() const { return global_; }
  const Interval& operator[](int dimension) const { return intervals_[static_cast<std::size_t>(dimension)]; }
  /// Shape of the part.
  Shape shape() const;
  bool is_whole() const { return shape() == global_; }
  /// Index in the global tensor of an element of the part.
  std::size_t global_index(std::size_t element) const;
  /// Calls f(element of the part, its index in the global tensor, count) for each run of elements
  /// [begin, end) of the part that are consecutive in the global tensor.
  template <class F>
  void for_each_run(std::size_t begin, std::size_t end, const F& f) const {
    const Shape part = shape();
    const std::size_t row = is_whole() ? part.count() : part[-1];
    for (std::size_t at = begin, count; at < end; at += count) {
      count = std::min(end - at, row - at % row);
      f(at, global_index(at), count);
    }
  }
  bool operator==(const Slice&) const = default;

 private:
  Shape global_;
  std::array<Interval, 4> intervals_{};
};

}  // namespace rz
