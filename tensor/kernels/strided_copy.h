#pragma once
/// Copies between two layouts of one index space: what permute, cat and narrow have in common.

#include <optional>

#include "comm/device/stream.h"
#include "tensor/element_ops.h"
#include "tensor/kernels/broadcast.h"

namespace rz::ops {

/// Element i is at out_at + out.offset(i) of the output, and at in_at + in.offset(i) of the input. Both maps
/// have the same extents, and `out` no place twice.
struct StridedCopy {
  IndexMap out, in;
  std::size_t out_at = 0, in_at = 0;
  bool is_part = false;  ///< of copies that fill the output together
};

/// The elements of a tensor in row-major order.
IndexMap layout_of(const Tensor&);

/// out = in, or out += in. The tensors have one dtype, which is any if they are not added. They do not
/// overlap. `op` is the operator in messages. The entry of the table for devices gets a copy whose extents
/// are in the order of the output's memory, without those of 1, and joined where both layouts permit it.
void strided_copy(const char* op, const Tensor& out, const Tensor& in, const StridedCopy&, Into,
                  const Stream&);

/// A copy where the output has consecutive columns, and the input consecutive rows, of matrices:
/// out[c · out_stride + r] = in[r · in_stride + c].
struct Transposition {
  IndexMap out, in;  ///< of the matrices
  std::size_t rows = 0, columns = 0, out_stride = 0, in_stride = 0;
};
/// nullopt if the last extents of a copy in the table's form are no such matrices.
std::optional<Transposition> transposition(const StridedCopy&);

/// Calls f(std::uintN_t{}) for elements of N / 8 bytes, which are only copied.
template <class F>
void dispatch_size(std::size_t bytes, const F& f) {
  if (bytes == 8) return f(std::uint64_t{});
  if (bytes == 4) return f(std::uint32_t{});
  if (bytes == 2) return f(std::uint16_t{});
  f(std::uint8_t{});
}

}  // namespace rz::ops
