#pragma once
/// Index arithmetic of broadcast operands, for host and device.

#include <array>
#include <cstddef>
#include <span>

#include "comm/core/math.h"
#include "tensor/tensor.h"

namespace rz::ops {

/// A row-major index space of up to four extents, the last fastest, and the offset of an operand's element
/// for each index. A stride of 0 repeats the operand.
struct IndexMap {
  int dims = 0;
  std::size_t extent[4] = {}, stride[4] = {};

  RZ_HOST_DEVICE std::size_t offset(std::size_t index) const {
    std::size_t at = 0;
    for (int d = dims - 1; d > 0; --d) {
      const std::size_t outer = index <= 0xffffffffu && extent[d] <= 0xffffffffu
                                    ? static_cast<unsigned>(index) / static_cast<unsigned>(extent[d])
                                    : index / extent[d];
      at += (index - outer * extent[d]) * stride[d];
      index = outer;
    }
    return dims ? at + index * stride[0] : 0;
  }
  std::size_t count() const {
    std::size_t n = 1;
    for (int d = 0; d < dims; ++d) n *= extent[d];
    return n;
  }
};

/// Whether `from` broadcasts to `to`.
bool broadcasts(const Shape& from, const Shape& to);

/// A contiguous tensor of shape `from` in the index space of `to`, to which it broadcasts. Extents of 1 are
/// left out, and neighbours are one extent where the offsets permit it: the last stride is 0 or 1.
IndexMap broadcast_map(const Shape& from, const Shape& to);

/// A sum of a contiguous tensor over some extents: `outputs` maps the index of a sum to its first term,
/// `terms` the index of a term to its distance from there.
struct Reduction {
  IndexMap outputs, terms;
  bool by_rows = true;  ///< the last extent of the tensor is one of `terms`
};
Reduction reduction(const Shape& out, const Shape& in);

/// Reads ranges of a broadcast operand on the host.
class BroadcastOperand {
 public:
  BroadcastOperand(const Tensor&, const Shape& to);
  /// Elements [begin, begin + n) of the broadcast tensor: in place where they are consecutive, otherwise a
  /// copy in `buffer`, which has memory for them.
  const std::byte* read(std::size_t begin, std::size_t n, std::byte* buffer) const;

 private:
  const std::byte* at(std::size_t index) const { return data_ + map_.offset(index) * size_; }

  IndexMap map_;
  const std::byte* data_;
  std::size_t size_;
};

}  // namespace rz::ops
