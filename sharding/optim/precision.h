#pragma once
/// What a model computes in while it is trained.

#include "comm/core/types.h"

namespace rz {

/// Below f32 this is mixed precision (Micikevicius et al., arXiv:1710.03740): the model's parameters,
/// activations and what ranks exchange have 16 bits, and each rank keeps f32 values, the masters, of the
/// elements that it updates. Needs a CUDA device.
struct Precision {
  DType parameters = DType::f32;  ///< f32, bf16 or f16
  DType gradients =
      DType::f32;  ///< in which they are accumulated and reduced: that of the parameters, or f32

  bool mixed() const { return parameters != DType::f32; }
  bool operator==(const Precision&) const = default;
};

}  // namespace rz
