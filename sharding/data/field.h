#pragma once
/// Fields of samples.

#include <string>

#include "comm/core/types.h"
#include "tensor/tensor.h"

namespace rz {

/// One field of every sample, e.g. {"x", DType::f32, {32}}; a label is a field without dimensions.
struct Field {
  std::string name;
  DType dtype = DType::f32;
  Shape shape = {};  ///< of one sample, at most three dimensions
};

}  // namespace rz
