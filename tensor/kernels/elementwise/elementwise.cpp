#include "tensor/ops.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tensor/kernels/elementwise/elementwise.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <type_traits>

#include "tensor/kernels/check.h"
#include "tensor/kernels/device_ops.h"
#include "tensor/kernels/elementwise/ranges.h"
#include "tensor/kernels/ordered_sum.h"
#include "tensor/kernels/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace rz {
namespace HWY_NAMESPACE {

void scale(const Tensor& out, const Tensor& in, float factor, bool accumulate, std::size_t begin,
           std::size_t end) {
  const auto scaled = [&](auto x) HWY_ATTR { return hn::Mul(hn::Set(Floats(), factor), x); };
  map_range_into(accumulate, begin, end, scaled, out, in);
}
void convert(const Tensor& out, const Tensor& in, std::size_t begin, std::size_t end) {
  ops::dispatch_dtype(out.dtype(), [&](auto o) HWY_ATTR {
    ops::dispatch_dtype(in.dtype(), [&](auto i) HWY_ATTR {
      using Out = decltype(o);
      using In = decltype(i);
      const In* const from = elements<In>(in) + begin;
      map(
          elements<Out>(out) + begin, end - begin, [](auto x) HWY_ATTR { return x; }, from);
    });
  });
}
void affine(const Tensor& out, const Tensor& in, float factor, float shift, std::size_t begin,
            std::size_t end) {
  const auto f = [&](auto x)
                     HWY_ATTR { return hn::MulAdd(x, hn::Set(Floats(), factor), hn::Set(Floats(), shift)); };
  map_range(begin, end, f, out, in);
}
void clamp(const Tensor& out, const Tensor& in, float low, float high, std::size_t begin, std::size_t end) {
  const auto f = [&](auto x) HWY_ATTR {
    const FloatVector bottom = hn::Set(Floats(), low), top = hn::Set(Floats(), high);
    x = hn::IfThenElse(hn::Lt(x, bottom), bottom, x);  // NaN stays NaN
    return hn::IfThenElse(hn::Gt(x, top), top, x);
  };
  map_range(begin, end, f, out, in);
}
void clamp_backward(const Tensor& d_in, const Tensor& d_out, const Tensor& in, float low, float high,
                    bool accumulate, std::size_t begin, std::size_t end) {
  const auto f = [&](auto dy, auto x) HWY_ATTR {
    const auto inside = hn::And(hn::Gt(x, hn::Set(Floats(), low)), hn::Lt(x, hn::Set(Floats(), high)));
    return hn::IfThenElseZero(inside, dy);
  };
  map_range_into(accumulate, begin, end, f, d_in, d_out, in);
}
void scaled_difference(const Tensor& out, const Tensor& a, const Tensor& b, float factor, bool accumulate,
                       std::size_t begin, std::size_t end) {
  const auto f = [&](auto x, auto y) HWY_ATTR { return hn::Mul(hn::Set(Floats(), factor), hn::Sub(x, y)); };
  map_range_into(accumulate, begin, end, f, out, a, b);
}
double squared_error(const Tensor& a, const Tensor& b, std::size_t begin, std::size_t end) {
  const auto squared = [](auto x, auto y) HWY_ATTR {
    const auto difference = hn::Sub(x, y);
    return hn::Mul(difference, difference);
  };
  double total = 0;
  ops::dispatch_dtype(a.dtype(), [&](auto t) HWY_ATTR {
    using T = decltype(t);
    const T *const x = elements<T>(a) + begin, *const y = elements<T>(b) + begin;
    total = sum(end - begin, squared, x, y);
  });
  return total;
}

}  // namespace HWY_NAMESPACE
}  // namespace rz
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace rz {

HWY_EXPORT(scale);
HWY_EXPORT(convert);
HWY_EXPORT(affine);
HWY_EXPORT(clamp);
HWY_EXPORT(clamp_backward);
HWY_EXPORT(scaled_difference);
HWY_EXPORT(squared_error);

namespace ops {

void fill(const Tensor& out, float value, const Stream& stream) {
  check("fill", {{"out", out}}, true, Rows::any_stride);
  if (const auto* d = on_device("fill", out, stream)) return d->fill(out, value, stream);
  dispatch_dtype(out.dtype(), [&](auto t) {
    using T = decltype(t);
    using Word = std::conditional_t<sizeof(T) == 2, std::uint16_t, std::uint32_t>;
    const auto same = std::bit_cast<Word>(from_f32<T>(value));  // a loop over a class is no vector loop
    each_range(
        stream,
        [&](std::size_t begin, std::size_t end, const Tensor& to) {
          std::fill_n(reinterpret_cast<Word*>(to.raw()) + begin, end - begin, same);
        },
        out);
  });
}

void copy(const Tensor& out, const Tensor& in, const Stream& stream) {
  check("copy", {{"out", out}, {"in", in}}, alike(out, in), Rows::any_stride);
  if (const auto* d = on_device("copy", out, stream)) return d->copy(out, in, stream);
  const auto part = [](std::size_t begin, std::size_t end, const Tensor& to, const Tensor& from) {
    const std::size_t size = size_of(from.dtype());
    if (to.dtype() == from.dtype())
      std::copy(from.raw() + begin * size, from.raw() + end * size, to.raw() + begin * size);
    else
      HWY_DYNAMIC_DISPATCH(convert)(to, from, begin, end);
  };
  each_range(stream, part, out, in);
}

void add_scaled(const Tensor& out, const Tensor& in, float factor, const Stream& stream) {
  check("add_scaled", {{"out", out}, {"in", in}}, alike(out, in), Rows::any_stride);
  if (const auto* d = on_device("add_scaled", out, stream)) return d->add_scaled(out, in, factor, stream);
  check_dtype("add_scaled", out.dtype(), {{"in", in}});
  const auto part = [&](std::size_t begin, std::size_t end, const Tensor& to, const Tensor& x) {
    HWY_DYNAMIC_DISPATCH(scale)(to, x, factor, true, begin, end);
  };
  each_range(stream, part, out, in);
}

void scale(const Tensor& out, const Tensor& in, float factor, const Stream& stream) {
  check("scale", {{"out", out}, {"in", in}}, alike(out, in), Rows::any_stride);
  if (const auto* d = on_device("scale", out, stream)) return d->scale(out, in, factor, stream);
  check_dtype("scale", out.dtype(), {{"in", in}});
  const auto part = [&](std::size_t begin, std::size_t end, const Tensor& to, const Tensor& x) {
    HWY_DYNAMIC_DISPATCH(scale)(to, x, factor, false, begin, end);
  };
  each_range(stream, part, out, in);
}

void affine(const Tensor& out, const Tensor& in, float factor, float shift, const Stream& stream) {
  check("affine", {{"out", out}, {"in", in}}, out.count() == in.count());
  if (const auto* d = on_device("affine", out, stream)) return d->affine(out, in, factor, shift, stream);
  check_dtype("affine", out.dtype(), {{"in", in}});
  stream.parallel_for(out.count(), elements_per_thread, [&](std::size_t begin, std::size_t end) {
    HWY_DYNAMIC_DISPATCH(affine)(out, in, factor, shift, begin, end);
  });
}

void clamp(const Tensor& out, const Tensor& in, float low, float high, const Stream& stream) {
  check("clamp", {{"out", out}, {"in", in}}, out.count() == in.count());
  if (const auto* d = on_device("clamp", out, stream)) return d->clamp(out, in, low, high, stream);
  check_dtype("clamp", out.dtype(), {{"in", in}});
  stream.parallel_for(out.count(), elements_per_thread, [&](std::size_t begin, std::size_t end) {
    HWY_DYNAMIC_DISPATCH(clamp)(out, in, low, high, begin, end);
  });
}

void clamp_backward(const Tensor& d_in, const Tensor& d_out, const Tensor& in, float low, float high,
                    Into into, const Stream& stream) {
  check("clamp_backward", {{"d_in", d_in}, {"d_out", d_out}, {"in", in}},
        d_in.count() == in.count() && d_out.count() == in.count());
  if (const auto* d = on_device("clamp_backward", d_in, stream))
    return d->clamp_backward(d_in, d_out, in, low, high, into, stream);
  check_dtype("clamp_backward", d_in.dtype(), {{"d_out", d_out}, {"in", in}});
  stream.parallel_for(in.count(), elements_per_thread, [&](std::size_t begin, std::size_t end) {
    HWY_DYNAMIC_DISPATCH(clamp_backward)(d_in, d_out, in, low, high, into == Into::accumulate, begin, end);
  });
}

void mean_squared_error(const Tensor& loss, const Tensor& a, const Tensor& b, const Stream& stream) {
  check("mean_squared_error", {{"loss", loss}, {"a", a}, {"b", b}},
        loss.count() == 1 && a.count() == b.count());
  if (const auto* d = on_device("mean_squared_error", a, stream))
    return d->mean_squared_error(loss, a, b, stream);
  check_dtype("mean_squared_error", a.dtype(), {{"b", b}});
  const double sum = ordered_sum(a.count(), stream, [&](std::size_t begin, std::size_t end) {
    return HWY_DYNAMIC_DISPATCH(squared_error)(a, b, begin, end);
  });
  *loss.data<float>() = static_cast<float>(sum / static_cast<double>(std::max<std::size_t>(1, a.count())));
}

void mean_squared_error_backward(const Tensor& d_a, const Tensor& d_loss, const Tensor& a, const Tensor& b,
                                 Into into, const Stream& stream) {
  constexpr const char* op = "mean_squared_error_backward";
  check(op, {{"d_a", d_a}, {"d_loss", d_loss}, {"a", a}, {"b", b}},
        d_a.count() == a.count() && d_loss.count() == 1 && a.count() == b.count());
  if (const auto* d = on_device(op, a, stream))
    return d->mean_squared_error_backward(d_a, d_loss, a, b, into, stream);
  check_dtype(op, d_a.dtype(), {{"a", a}, {"b", b}});
  const double count = static_cast<double>(std::max<std::size_t>(1, a.count()));
  const auto factor = static_cast<float>(2.0 * *d_loss.data<float>() / count);
  stream.parallel_for(a.count(), elements_per_thread, [&](std::size_t begin, std::size_t end) {
    HWY_DYNAMIC_DISPATCH(scaled_difference)(d_a, a, b, factor, into == Into::accumulate, begin, end);
  });
}

}  // namespace ops
}  // namespace rz
#endif
