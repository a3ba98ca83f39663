#pragma once
/// A rectangular part of a tensor of any number of dimensions.

#include <algorithm>
#include <cstdint>
#include <vector>

namespace rz {

/// Indices [offset, offset + extent) in each dimension. Elements of box and tensor are numbered in row-major
/// order.
struct Box {
  std::vector<std::uint64_t> offset, extent;

  /// The whole of a tensor.
  static Box whole(const std::vector<std::uint64_t>& shape) {
    return {std::vector<std::uint64_t>(shape.size(), 0), shape};
  }
  std::uint64_t count() const;
  /// Whether both have an element in common; they are of one tensor.
  bool overlaps(const Box&) const;
  /// Index in a tensor of this shape of an element of the box.
  std::uint64_t index_in(const std::vector<std::uint64_t>& shape, std::uint64_t element) const;
  /// Calls f(element of the box, its index in the tensor, count) for runs of elements [begin, end) of the box
  /// that are consecutive in a tensor of this shape, in that order.
  template <class F>
  void for_each_run(const std::vector<std::uint64_t>& shape, std::uint64_t begin, std::uint64_t end,
                    const F& f) const {
    const std::uint64_t row = row_count(shape);
    for (std::uint64_t at = begin, n; at < end; at += n) {
      n = std::min(end - at, row - at % row);
      f(at, index_in(shape, at), n);
    }
  }
  /// Elements of the box that are consecutive in a tensor of this shape, from each multiple of their number.
  std::uint64_t row_count(const std::vector<std::uint64_t>& shape) const;

  bool operator==(const Box&) const = default;
};

}  // namespace rz
