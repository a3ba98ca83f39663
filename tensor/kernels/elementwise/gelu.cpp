// gelu(x) = x/2 (1 + tanh u) with u = √(2/π) (x + 0.044715 x³). With s = (1 + tanh u)/2 = 1/(1 + e^-2u) it is
// x·s, and its derivative is s + x·s·(1 - s)·2u' with 1 - s = s·e^-2u: no cancellation anywhere.

#include "tensor/ops.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tensor/kernels/elementwise/gelu.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "tensor/kernels/check.h"
#include "tensor/kernels/device_ops.h"
#include "tensor/kernels/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace rz {
namespace HWY_NAMESPACE {

constexpr double root = 1.5957691216057307;  // 2 √(2/π)
constexpr double cubic = 0.044715;

/// e^-2u
HWY_INLINE FloatVector decay(FloatVector x, FloatVector square) {
  const Floats d;
  return exponential(hn::Mul(x, hn::MulAdd(square, hn::Set(d, -root * cubic), hn::Set(d, -root))));
}

HWY_INLINE FloatVector sigmoid(FloatVector decay) {
  const FloatVector one = hn::Set(Floats(), 1.0f);
  return hn::Div(one, hn::Add(one, decay));
}

/// The derivative. Beyond |x| = 9 it is 0 or 1 to the last bit; x is clamped there, so that no product
/// overflows. That of an infinity is NaN, as in PyTorch.
HWY_INLINE FloatVector derivative(FloatVector x) {
  const Floats d;
  const FloatVector bound = hn::Set(d, 9.0f), undefined = hn::IfThenElseZero(hn::IsInf(x), hn::NaN(d));
  x = hn::IfThenElse(hn::Gt(hn::Abs(x), bound), hn::CopySign(bound, x), x);
  const FloatVector square = hn::Mul(x, x), e = decay(x, square), s = sigmoid(e);
  const FloatVector twice_du = hn::MulAdd(square, hn::Set(d, 3 * root * cubic), hn::Set(d, root));
  return hn::Or(undefined, hn::MulAdd(hn::Mul(x, s), hn::Mul(hn::Mul(e, s), twice_du), s));
}

void gelu(const Tensor& out, const Tensor& in, std::size_t begin, std::size_t end) {
  const auto f = [](auto x) HWY_ATTR { return hn::Mul(x, sigmoid(decay(x, hn::Mul(x, x)))); };
  map_range(begin, end, f, out, in);
}

void gelu_backward(const Tensor& d_in, const Tensor& d_out, const Tensor& in, bool accumulate,
                   std::size_t begin, std::size_t end) {
  const auto store = [](auto dy, auto x) HWY_ATTR { return hn::Mul(dy, derivative(x)); };
  const auto add = [](auto dx, auto dy, auto x) HWY_ATTR { return hn::MulAdd(dy, derivative(x), dx); };
  if (accumulate)
    map_range(begin, end, add, d_in, d_in, d_out, in);
  else
    map_range(begin, end, store, d_in, d_out, in);
}

}  // namespace HWY_NAMESPACE
}  // namespace rz
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace rz {

HWY_EXPORT(gelu);
HWY_EXPORT(gelu_backward);

namespace ops {

namespace {
constexpr std::size_t grain = 1024;  // elements
}

void gelu(const Tensor& out, const Tensor& in, const Stream& stream) {
  check("gelu", {{"out", out}, {"in", in}}, out.count() == in.count());
  if (const auto* d = on_device("gelu", out, stream)) return d->gelu(out, in, stream);
  check_dtype("gelu", out.dtype(), {{"in", in}});
  stream.parallel_for(out.count(), grain, [&](std::size_t begin, std::size_t end) {
    HWY_DYNAMIC_DISPATCH(gelu)(out, in, begin, end);
  });
}

void gelu_backward(const Tensor& d_in, const Tensor& d_out, const Tensor& in, Into into,
                   const Stream& stream) {
  check("gelu_backward", {{"d_in", d_in}, {"d_out", d_out}, {"in", in}},
        d_in.count() == in.count() && d_out.count() == in.count());
  if (const auto* d = on_device("gelu_backward", d_in, stream))
    return d->gelu_backward(d_in, d_out, in, into, stream);
  check_dtype("gelu_backward", d_in.dtype(), {{"d_out", d_out}, {"in", in}});
  stream.parallel_for(in.count(), grain, [&](std::size_t begin, std::size_t end) {
    HWY_DYNAMIC_DISPATCH(gelu_backward)(d_in, d_out, in, into == Into::accumulate, begin, end);
  });
}

}  // namespace ops
}  // namespace rz
#endif
