// Losses of elements.

#include "tensor/loss_ops.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tensor/kernels/losses/element_loss.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "tensor/kernels/device_ops.h"
#include "tensor/kernels/logarithm-inl.h"
#include "tensor/kernels/losses/row_sums.h"

HWY_BEFORE_NAMESPACE();
namespace rz {
namespace HWY_NAMESPACE {

template <class T>
double squared_errors(const T* x, const T* y, std::size_t n) {
  const auto square = [](auto a, auto b) HWY_ATTR {
    const auto difference = hn::Sub(a, b);
    return hn::Mul(difference, difference);
  };
  return sum(n, square, x, y);
}

/// max(x, 0) - x y + log(1 + e^-|x|): no term is negative for y from 0 to 1. The logarithm is in f32.
HWY_INLINE DoubleVector binary_cross_entropy(DoubleVector x, DoubleVector y, DoubleVector logarithm) {
  return hn::Add(hn::NegMulAdd(x, y, hn::Max(x, hn::Zero(Doubles()))), logarithm);
}
/// The sum of a vector of elements, in as many sums as a vector of doubles has lanes.
HWY_INLINE DoubleVector binary_cross_entropy(FloatVector x, FloatVector y) {
  const FloatVector logarithm = log_of_one_plus(exponential(hn::Neg(hn::Abs(x))));
  return hn::Add(binary_cross_entropy(lower_half(x), lower_half(y), lower_half(logarithm)),
                 binary_cross_entropy(upper_half(x), upper_half(y), upper_half(logarithm)));
}

template <class T>
double binary_cross_entropies(const T* x, const T* y, std::size_t n) {
  const Floats d;
  const std::size_t lanes = hn::Lanes(d), whole = n / lanes * lanes;
  DoubleVector total = hn::Zero(Doubles());
  for (std::size_t i = 0; i < whole; i += lanes)
    total = hn::Add(total, binary_cross_entropy(load(d, x + i), load(d, y + i)));
  // the loss of -104 and 0 is 0 in f32, unlike that of 0 and 0
  if (whole < n)
    total = hn::Add(total, binary_cross_entropy(load_part(d, x + whole, n - whole, -104.0f),
                                                load_part(d, y + whole, n - whole, 0.0f)));
  return hn::GetLane(hn::SumOfLanes(Doubles(), total));
}

double element_losses(const Tensor& x, const Tensor& y, ops::ElementLoss how, std::size_t begin,
                      std::size_t end) {
  double total = 0;
  ops::dispatch_dtype(x.dtype(), [&](auto type) HWY_ATTR {
    using T = decltype(type);
    const T *const a = elements<T>(x) + begin, *const b = elements<T>(y) + begin;
    total = how == ops::ElementLoss::squared_error ? squared_errors(a, b, end - begin)
                                                   : binary_cross_entropies(a, b, end - begin);
  });
  return total;
}

void element_gradients(const Tensor& d_x, const Tensor& x, const Tensor& y, ops::ElementLoss how,
                       float factor, bool accumulate, std::size_t begin, std::size_t end) {
  const auto squared_error = [=](auto a, auto b)
                                 HWY_ATTR { return hn::Mul(hn::Sub(a, b), hn::Set(Floats(), 2 * factor)); };
  const auto cross_entropy = [=](auto a, auto b) HWY_ATTR {
    const FloatVector one = hn::Set(Floats(), 1.0f);
    const FloatVector p = hn::Div(one, hn::Add(one, exponential(hn::Neg(a))));
    return hn::Mul(hn::Sub(p, b), hn::Set(Floats(), factor));
  };
  ops::dispatch_dtype(x.dtype(), [&](auto type) HWY_ATTR {
    using T = decltype(type);
    T* const d = elements<T>(d_x) + begin;
    const T *const a = elements<T>(x) + begin, *const b = elements<T>(y) + begin;
    if (how == ops::ElementLoss::squared_error)
      map_into(accumulate, d, end - begin, squared_error, a, b);
    else
      map_into(accumulate, d, end - begin, cross_entropy, a, b);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace rz
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace rz {

HWY_EXPORT(element_losses);
HWY_EXPORT(element_gradients);

namespace ops {

void element_loss(const Tensor& loss, const Tensor& sums, const Tensor& x, const Tensor& y, ElementLoss how,
                  const Stream& stream) {
  constexpr const char* op = "element_loss";
  check(op, {{"loss", loss}, {"x", x}, {"y", y}}, loss.count() == 1 && x.count() == y.count());
  losses::check_pair(op, "sums", sums, x);
  check_dtype(op, x.dtype(), {{"y", y}});
  if (const auto* d = on_device(op, x, stream)) return d->element_loss(loss, sums, x, y, how, stream);
  const double sum = ordered_sum(x.count(), stream, [&](std::size_t begin, std::size_t end) {
    return HWY_DYNAMIC_DISPATCH(element_losses)(x, y, how, begin, end);
  });
  losses::write_sums(loss, sums, sum, x.count());
}

void element_loss_backward(const Tensor& d_x, const Tensor& d_loss, const Tensor& x, const Tensor& y,
                           ElementLoss how, Into into, const Stream& stream) {
  constexpr const char* op = "element_loss_backward";
  check(op, {{"d_x", d_x}, {"d_loss", d_loss}, {"x", x}, {"y", y}},
        d_x.count() == x.count() && x.count() == y.count() && d_loss.count() == 1);
  check_dtype(op, x.dtype(), {{"d_x", d_x}, {"y", y}});
  if (const auto* d = on_device(op, x, stream))
    return d->element_loss_backward(d_x, d_loss, x, y, how, into, stream);
  stream.parallel_for(x.count(), 1024, [&](std::size_t begin, std::size_t end) {
    HWY_DYNAMIC_DISPATCH(element_gradients)
    (d_x, x, y, how, *d_loss.data<float>(), into == Into::accumulate, begin, end);
  });
}

}  // namespace ops
}  // namespace rz
#endif
