#pragma once
/// Elements of strided views, read from a file.

#include <cstdint>
#include <span>
#include <vector>

#include "sharding/checkpoint/torch_files/torch_tensor.h"
#include "sharding/io/input_file.h"

namespace rz {

/// The index in its storage, counted from the first element, of the last element of a view, plus 1; 0 if it
/// has no elements. False if a number exceeds 64 bits.
bool extent_of_view(std::span<const std::uint64_t> shape, std::span<const std::uint64_t> strides,
                    std::uint64_t& extent);

/// What the last call has read of a view, for the next one: some of its outermost rows. Empty at first, and
/// after the last element. At most 65 MiB.
struct StridedWindow {
  std::uint64_t data = 0;  ///< of the tensor
  std::vector<std::uint64_t> shape, strides;
  std::uint64_t row_begin = 0, row_end = 0;
  bool row_major = false;  ///< else the rows lie as in the file
  std::vector<std::byte> bytes, columns;
};

/// Reads elements from `begin` on in row-major order. The view lies in the file.
void read_strided(const InputFile&, const TorchTensor&, std::uint64_t begin, std::span<std::byte> out,
                  StridedWindow&);

}  // namespace rz
