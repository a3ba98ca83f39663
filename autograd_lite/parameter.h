#pragma once
/// A named tensor that is trained.

#include <string>

#include "tensor/tensor.h"

namespace rz {

/// How a parameter's elements are drawn before training: see autograd_lite/init.h.
struct Initial {
  enum Kind { constant, normal, uniform };
  Kind kind = constant;
  /// The constant, the standard deviation around 0, or the bound of [-scale, scale).
  float scale = 0;
};

/// Strategies move the memory behind a parameter: `value` may be undefined outside of the scopes that use it
/// (ZeRO-3), and `grad` may be a view of a bucket. Code that runs in backward reads `value` then, and keeps
/// no copy of it.
struct Parameter {
  std::string name;  ///< "transformer.h.0.attn.c_attn.weight"
  Shape shape;
  bool requires_grad = true;
  Tensor value;
  Tensor grad;
  /// True after zero_grad() until the first accumulation, which then overwrites: gradients are never filled
  /// with zeros.
  bool grad_is_fresh = true;
  Initial initial{};

  std::size_t count() const { return shape.count(); }
};

}  // namespace rz
