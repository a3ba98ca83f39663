#pragma once
/// Where a file of torch.save() has a tensor.

#include <cstdint>
#include <string>
#include <vector>

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

}  // namespace rz
