#pragma once
/// Dtypes of a model in training.

#include "../../comm/core/types.h"

namespace rz {

/// If `parameters` is not f32 this is mixed precision (Micikevicius et al., arXiv:1710.03740): parameters,
/// activations and communicated data have 16 bits, and each rank keeps f32 values, the masters, of the
/// elements that it updates. On the host, products of bf16 are fast where the CPU has AMX-BF16 or AVX512-BF16
/// (gemm_16bit.h of tensor/kernels/linear_algebra); other products convert to f32, at about the speed of f32.
struct Precision {
  DType parameters = DType::f32;  ///< f32, bf16 or f16
  DType gradients = DType::f32;   ///< dtype of accumulation and reduction: that of the parameters, or f32

  /// True if the model has 16-bit parameters.
  bool mixed() const { return parameters != DType::f32; }
  bool operator==(const Precision&) const = default;
};

}  // namespace rz
