#pragma once
/// A rectangular part of a tensor of any number of dimensions.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "tensor.h"

namespace rz {

/// Indices [offset, offset + extent) in each dimension of a tensor of this shape, or of another one of
/// equally many elements: [C, 3C] may be cut as [C, 3, C]. Elements of box and tensor are numbered in
/// row-major order.
struct Box {
  std::vector<std::uint64_t> shape, offset, extent;

  /// The whole of a tensor.
  static Box whole(const std::vector<std::uint64_t>& shape) {
    return {shape, std::vector<std::uint64_t>(shape.size(), 0), shape};
  }
  /// Whether offset and extent have one number per dimension, and lie within the shape.
  bool is_valid() const;
  bool is_whole() const { return extent == shape; }
  std::uint64_t count() const;
  /// Whether both have an element in common; their shapes are equal.
  bool overlaps(const Box&) const;
  /// Index in the tensor of an element of the box.
  std::uint64_t index(std::uint64_t element) const;
  /// Elements of the box that are consecutive in the tensor, from each multiple of their number. Trailing
  /// dimensions that are whole are in one such run.
  std::uint64_t run_count() const;
  /// Calls f(element of the box, its index in the tensor, count) for the runs of elements [begin, end) of the
  /// box that are consecutive in the tensor, in that order.
  template <class F>
  void for_each_run(std::uint64_t begin, std::uint64_t end, const F& f) const {
    const std::uint64_t run = run_count();
    for (std::uint64_t at = begin, n; at < end; at += n) {
      n = std::min(end - at, run - at % run);
      f(at, index(at), n);
    }
  }

  bool operator==(const Box&) const = default;
};

std::vector<std::uint64_t> extents(const Shape&);

}  // namespace rz
