#pragma once
/// How gradients travel between ranks.

#include <optional>

#include "comm/core/types.h"

namespace rz {

/// Gradients are scaled, rounded to `dtype`, summed over the ranks, widened and scaled again; the result is
/// their mean. Sums of 16-bit types are accumulated in f32 and rounded once. Must be equal on all ranks.
/// Names and arithmetic are those of DeepSpeed, which also rounds each factor's product to `dtype`.
struct WireFormat {
  /// "communication_data_type", and PyTorch's fp16 and bf16 compression hooks: f32, bf16 or f16. Empty: that
  /// of the gradients.
  std::optional<DType> communication_data_type;
  /// Multiplies by 1 / ranks before the sum, and not after it. f16 then overflows less, and loses more small
  /// values.
  bool prescale_gradients = false;
  /// Multiplies by 1 / factor before the sum and by factor / ranks after it. No effect with
  /// prescale_gradients.
  double gradient_predivide_factor = 1;

  bool operator==(const WireFormat&) const = default;
};

/// Errc::invalid_argument unless the type is f32, bf16 or f16, and the factor positive and finite.
void check(const WireFormat&);

}  // namespace rz
