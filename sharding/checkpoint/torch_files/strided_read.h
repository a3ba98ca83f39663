#pragma once
/// Tensors in a file of torch.save(), which are strided views, and their elements.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "sharding/io/file.h"

namespace rz {

/// A tensor in a file: a view of its storage.
struct TorchTensor {
  std::string dtype;  ///< its name in safetensors: "F32"
  unsigned element_bytes = 4;
  std::vector<std::uint64_t> shape;
  std::vector<std::uint64_t> strides;  ///< in elements
  std::uint64_t count = 1;             ///< elements
  std::uint64_t data = 0;              ///< offset in the file of the first element
};

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
