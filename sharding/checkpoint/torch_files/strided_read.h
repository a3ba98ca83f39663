#pragma once
/// Elements of strided views, read from a file.

#include <cstdint>
#include <span>

#include "sharding/checkpoint/torch_files/torch_tensor.h"
#include "sharding/io/input_file.h"

namespace rz {

/// The index in its storage, counted from the first element, of the last element of a view, plus 1; 0 if it
/// has no elements. False if a number exceeds 64 bits.
bool extent_of_view(std::span<const std::uint64_t> shape, std::span<const std::uint64_t> strides,
                    std::uint64_t& extent);

/// Reads elements from `begin` on in row-major order. The view lies in the file.
void read_strided(const InputFile&, const TorchTensor&, std::uint64_t begin, std::span<std::byte> out);

}  // namespace rz
