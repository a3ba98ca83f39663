#pragma once
/// Names of the tensors of a training in checkpoints, and their shapes.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "comm/core/text.h"
#include "tensor/tensor.h"

namespace rz {

inline std::string model_tensor(std::string_view parameter) { return concat("model/", parameter); }
inline std::string buffer_tensor(std::string_view buffer) { return concat("buffer/", buffer); }
inline std::string optimizer_tensor(std::string_view state, std::string_view parameter) {
  return concat("optimizer/", state, "/", parameter);
}

inline std::vector<std::uint64_t> extents(const Shape& shape) {
  std::vector<std::uint64_t> out;
  for (int d = 0; d < shape.dims(); ++d) out.push_back(shape[d]);
  return out;
}

}  // namespace rz
