#pragma once
/// A named trainable tensor.

#include <string>

#include "tensor/tensor.h"

namespace rz {

/// Initial distribution of a parameter's elements; see autograd_lite/init.h.
struct Initial {
  enum Kind { constant, normal, uniform };
  Kind kind = constant;
  /// The constant, the standard deviation of a normal distribution with mean 0, or the bound of uniform
  /// [-scale, scale).
  float scale = 0;
};

/// A parameter. Strategies replace its memory: `value` may be undefined outside the scopes that use it
/// (ZeRO-3), and `grad` may be a view of a bucket. Code that runs in backward must read `value` at that time
/// and must not keep a copy.
struct Parameter {
  std::string name;  ///< "transformer.h.0.attn.c_attn.weight"
  Shape shape;
  bool requires_grad = true;
  Tensor value;
  Tensor grad;
  /// True between zero_grad() and the first accumulation, which then overwrites `grad`. Gradients are never
  /// zero-filled.
  bool grad_is_fresh = true;
  Initial initial{};

  std::size_t count() const { return shape.count(); }
};

}  // namespace rz
