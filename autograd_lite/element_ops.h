#pragma once
/// Element-wise operators, sums and casts on a tape, with PyTorch's names and broadcasting
/// (tensor/element_ops.h). The gradient of an operand that was broadcast is the sum over the repeated
/// elements.
///
/// With Tape::autocast(), as with torch.autocast: exp, log, rsqrt, reciprocal, softplus, pow, softmax,
/// log_softmax, sum and a scalar divided by a tensor compute in f32; operators of two tensors do if their
/// dtypes differ; all others compute in the dtype of their input.

#include <utility>

#include "tape.h"

namespace rz::nn {

// ---- dtypes: how operators follow Tape::autocast(). Without it each of autocast_*() returns its argument.
// An undefined Var stays undefined; values that are not f32, f16 or bf16 are not cast.

/// x in another dtype, f32, f16 or bf16, rounded to nearest; x itself if it has that dtype. The gradient is
/// converted back. The cast of a parameter is not kept where the parameter's memory is released.
Var cast(Tape&, Var x, DType);

/// For products: in the dtype of autocast.
Var autocast_low(Tape&, Var);
/// For norms, softmax and losses: in f32.
Var autocast_wide(Tape&, Var);
/// For sums and element-wise products: both in f32 if their dtypes differ.
std::pair<Var, Var> autocast_alike(Tape&, Var a, Var b);

// ---- of one tensor: exp, log, sqrt, rsqrt, reciprocal, abs, relu, sigmoid, silu, tanh, sin, cos, softplus,
// gelu_erf; with a parameter elu(x, alpha = 1), leaky_relu(x, negative_slope = 0.01), pow(x, exponent)
#define RZ_UNARY(name, saved, cast) Var name(Tape&, Var);
#define RZ_PARAMETRIC(name, saved, cast, parameter) Var name(Tape&, Var, float parameter);
#include "../tensor/element_ops.inc"
Var neg(Tape&, Var);
/// x itself, or a copy with contiguous rows.
Var contiguous(Tape&, Var x);
/// x limited to [low, high]; the gradient is 0 outside.
Var clamp(Tape&, Var x, float low, float high);
Var softmax(Tape&, Var x);      ///< over the last extent
Var log_softmax(Tape&, Var x);  ///< over the last extent

// ---- of two tensors: add, sub, mul, div, minimum, maximum, pow; comparisons, also with a scalar: eq, ne,
// lt, le, gt, ge
/// Errc::invalid_argument names the shapes if they do not broadcast. A comparison is 0 or 1, in the dtype of
/// its operands, and has no gradient; the scalar is rounded to that dtype.
#define RZ_BINARY(name) Var name(Tape&, Var a, Var b);
#define RZ_COMPARISON(name)      \
  Var name(Tape&, Var a, Var b); \
  Var name(Tape&, Var a, float b);
#include "../tensor/element_ops.inc"

// ---- by a condition, which is true where it is not 0; it has no gradient
/// a or b. The three are broadcast.
Var where(Tape&, Var condition, Var a, Var b);
/// value where the mask is true, otherwise x.
Var masked_fill(Tape&, Var x, Var mask, float value);

// ---- of a tensor and a scalar
Var add(Tape&, Var, float);
Var sub(Tape&, Var, float);
Var sub(Tape&, float, Var);
Var mul(Tape&, Var, float);
/// The product with 1 / divisor, rounded to f32, as PyTorch on CUDA devices.
Var div(Tape&, Var, float divisor);
Var div(Tape&, float, Var);

// ---- sums, in double; the result has the dtype of x
Var sum(Tape&, Var x);   ///< over all elements: a scalar
Var mean(Tape&, Var x);  ///< NaN without elements
/// Over one extent; a negative one counts from the last. It is left out of the result, or stays as 1.
/// Errc::invalid_argument if x has no such extent.
Var sum(Tape&, Var x, int extent, bool keepdim = false);
Var mean(Tape&, Var x, int extent, bool keepdim = false);

/// x, repeated to a shape to which its own broadcasts: a copy. An extent to keep is written again.
Var expand(Tape&, Var x, const Shape&);

}  // namespace rz::nn

namespace rz {

// ---- nn::add, sub, mul, div and neg, on the tape of the operands
/// Errc::invalid_argument if an operand stands for no value, or if the operands are of two tapes.
Var operator+(Var a, Var b);
Var operator-(Var a, Var b);
Var operator*(Var a, Var b);
Var operator/(Var a, Var b);
Var operator+(Var a, float b);
Var operator-(Var a, float b);
Var operator*(Var a, float b);
Var operator/(Var a, float b);
Var operator+(float a, Var b);
Var operator-(float a, Var b);
Var operator*(float a, Var b);
Var operator/(float a, Var b);
Var operator-(Var);

}  // namespace rz
