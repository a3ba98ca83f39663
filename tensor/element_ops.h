#pragma once
/// Element-wise operators with PyTorch's names, and sums, with the rules of tensor/ops.h: one dtype per call,
/// f32, f16 or bf16; arithmetic in f32, sums in double; one rounding a result; the same bits on every number
/// of threads.
///
/// Broadcasting as in NumPy and PyTorch: shapes are aligned at their last extents, and an extent of 1, or a
/// missing one, is repeated. A full operand may be the output.

#include "../comm/device/stream.h"
#include "tensor.h"

namespace rz::ops {

enum class Into : bool { overwrite, accumulate };

enum class Unary {
#define RZ_UNARY(name, saved, cast) name,
#include "element_ops.inc"
};
enum class Binary {
#define RZ_BINARY(name) name,
#include "element_ops.inc"
};
/// Operators without a gradient, whose values are 0 and 1.
bool is_comparison(Binary);
const char* name_of(Unary);
const char* name_of(Binary);

/// An operator of one tensor, and its parameter if it has one: the exponent of pow, alpha of elu, the slope
/// of leaky_relu below 0.
struct UnaryFunction {
  UnaryFunction(Unary op, float parameter = 0) : op(op), parameter(parameter) {}
  Unary op;
  float parameter;
};

/// What the gradient of an operator reads.
enum class Saved : bool { input, output };
Saved saved_by(Unary);

/// out = f(in). NaN stays NaN. log of a negative number, and sqrt of it, is NaN. relu, sqrt, silu, sin, elu
/// and leaky_relu keep -0. sin and cos are accurate for every number, NaN for infinities. softplus is log(1 +
/// e^x), and x above 20. gelu_erf is x · Φ(x), the "gelu" of BERT; ops::gelu is its tanh approximation.
/// elu is alpha · (e^x - 1) below 0. pow is C's, except that exponents of ±0.5 are sqrt and rsqrt: x^0 is 1,
/// for NaN as well; that of a negative number is NaN unless the exponent is an integer.
void unary(const Tensor& out, const Tensor& in, UnaryFunction, const Stream&);
/// d_in = d_out · f'; `saved` is the input or the output, as saved_by(). abs and relu have the gradient 0 at
/// 0; relu that of d_out at NaN; elu and leaky_relu at 0 that from the left; pow with exponent 0 has none.
/// gelu_erf's is NaN at ±infinity, as in PyTorch.
void unary_backward(const Tensor& d_in, const Tensor& d_out, const Tensor& saved, UnaryFunction, Into,
                    const Stream&);

/// The shape of an operator of two tensors. Errc::invalid_argument names `op` and both shapes if they do not
/// broadcast.
Shape broadcast_shapes(const char* op, const Shape&, const Shape&);
/// out = f(a, b), with the shape broadcast_shapes(a, b). Operands of equal counts that are not broadcast may
/// have other shapes, and rows with a stride. minimum and maximum are NaN if an operand is. Comparisons are 1
/// or 0; with a NaN all but ne are 0.
void binary(const Tensor& out, const Tensor& a, const Tensor& b, Binary, const Stream&);
inline void add(const Tensor& out, const Tensor& a, const Tensor& b, const Stream& stream) {
  binary(out, a, b, Binary::add, stream);
}
/// d = d_out · ∂f/∂a for operand 0, or ∂f/∂b for operand 1, with the shape of d_out: sum_to_size() makes it
/// the gradient of an operand that was broadcast. Equal operands of minimum and maximum get half
/// each, and both all of it if one is NaN. That of comparisons is 0; that of a power by its exponent is 0 at
/// 0^b with b >= 0, by its base at a^0.
void binary_backward(const Tensor& d, const Tensor& d_out, const Tensor& a, const Tensor& b, Binary,
                     int operand, const Stream&);

/// out = a where `condition` is not 0, otherwise b, with the shape to which the three broadcast. NaN is not
/// 0.
void where(const Tensor& out, const Tensor& condition, const Tensor& a, const Tensor& b, const Stream&);

/// out = factor · in + shift. It is rounded once if factor is 1 or -1. A shift of -0 leaves factor · in.
void affine(const Tensor& out, const Tensor& in, float factor, float shift, const Stream&);
/// out = in limited to [low, high]; NaN stays NaN. The result is `high` if low > high.
void clamp(const Tensor& out, const Tensor& in, float low, float high, const Stream&);
/// d_in = d_out where low < in < high, otherwise 0, as in PyTorch 2.15.
void clamp_backward(const Tensor& d_in, const Tensor& d_out, const Tensor& in, float low, float high, Into,
                    const Stream&);

/// out = Σ in / divisor over the extents that out, a shape that broadcasts to in's, lacks or has as 1.
void sum_to_size(const Tensor& out, const Tensor& in, double divisor, Into, const Stream&);
/// out = factor · in, broadcast to the shape of out.
void expand(const Tensor& out, const Tensor& in, float factor, Into, const Stream&);

/// out = log softmax over the last extent; rows may have a stride.
void log_softmax(const Tensor& out, const Tensor& in, const Stream&);
void log_softmax_backward(const Tensor& d_in, const Tensor& d_out, const Tensor& out, Into, const Stream&);

}  // namespace rz::ops
