#include "tensor/ops.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tensor/kernels/elementwise/elementwise.cpp"
#include "tensor/kernels/targets.h"
// after the targets
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>

#include "tensor/kernels/check.h"
#include "tensor/kernels/device_ops.h"
#include "tensor/kernels/ordered_sum.h"
#include "tensor/kernels/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace rz {
namespace HWY_NAMESPACE {

void add(const Tensor& out, const Tensor& a, const Tensor& b, std::size_t begin, std::size_t end) {
  map_range(
      begin, end, [](auto x, auto y) HWY_ATTR { return hn::Add(x, y); }, out, a, b);
}
void multiply(const Tensor& out, const Tensor& a, const Tensor& b, std::size_t begin, std::size_t end) {
  map_range(
      begin, end, [](auto x, auto y) HWY_ATTR { return hn::Mul(x, y); }, out, a, b);
}
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
void relu(const Tensor& out, const Tensor& in, std::size_t begin, std::size_t end) {
  const auto f = [](auto x) HWY_ATTR {
    return hn::IfThenZeroElse(hn::Lt(x, hn::Zero(Floats())), x);  // NaN stays NaN
  };
  map_range(begin, end, f, out, in);
}
void relu_backward(const Tensor& d_in, const Tensor& d_out, const Tensor& in, bool accumulate,
                   std::size_t begin, std::size_t end) {
  const auto f = [](auto dy, auto x)
                     HWY_ATTR { return hn::IfThenElseZero(hn::Gt(x, hn::Zero(Floats())), dy); };
  map_range_into(accumulate, begin, end, f, d_in, d_out, in);
}
void tanh(const Tensor& out, const Tensor& in, std::size_t begin, std::size_t end) {
  map_range(
      begin, end, [](auto x) HWY_ATTR { return hyperbolic_tangent(x); }, out, in);
}
void tanh_backward(const Tensor& d_in, const Tensor& d_out, const Tensor& out, bool accumulate,
                   std::size_t begin, std::size_t end) {
  const auto f = [](auto dy, auto y) HWY_ATTR {
    const FloatVector one = hn::Set(Floats(), 1.0f);
    return hn::Mul(dy, hn::Mul(hn::Sub(one, y), hn::Add(one, y)));
  };
  map_range_into(accumulate, begin, end, f, d_in, d_out, out);
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

HWY_EXPORT(add);
HWY_EXPORT(multiply);
HWY_EXPORT(scale);
HWY_EXPORT(convert);
HWY_EXPORT(relu);
HWY_EXPORT(relu_backward);
HWY_EXPORT(tanh);
HWY_EXPORT(tanh_backward);
HWY_EXPORT(scaled_difference);
HWY_EXPORT(squared_error);

namespace ops {

namespace {

constexpr std::size_t grain = 4096;  // elements per thread at least

/// Row r of a tensor that has, or is read as having, rows of n elements.
Tensor row_of(const Tensor& t, std::size_t r, std::size_t n) {
  const std::size_t stride = t.contiguous() ? n : t.row_stride();
  return Tensor::borrow(t.raw() + r * stride * size_of(t.dtype()), {n}, t.dtype(), t.device());
}

/// Calls f(begin, end, tensors…) on ranges of all elements, row by row where a tensor has a row stride.
template <class F, class... T>
void each_range(const Stream& stream, const F& f, const Tensor& out, const T&... in) {
  if (out.contiguous() && (in.contiguous() && ...))
    return stream.parallel_for(out.count(), grain,
                               [&](std::size_t begin, std::size_t end) { f(begin, end, out, in...); });
  const std::size_t n = last(out), rows_per_thread = std::max<std::size_t>(1, grain / n);
  stream.parallel_for(rows(out), rows_per_thread, [&](std::size_t begin, std::size_t end) {
    for (std::size_t r = begin; r < end; ++r) f(0, n, row_of(out, r, n), row_of(in, r, n)...);
  });
}

/// Both have one count, and the same rows if one of them has a row stride.
bool alike(const Tensor& a, const Tensor& b) {
  return a.contiguous() && b.contiguous() ? a.count() == b.count() : same_rows(a, b);
}

}  // namespace

void fill(const Tensor& out, float value, const Stream& stream) {
  check("fill", {{"out", out}}, true, Rows::any_stride);
  if (const auto* d = on_device("fill", out, stream)) return d->fill(out, value, stream);
  dispatch_dtype(out.dtype(), [&](auto t) {
    using T = decltype(t);
    const T same = from_f32<T>(value);
    each_range(
        stream,
        [&](std::size_t begin, std::size_t end, const Tensor& to) {
          std::fill(to.data<T>() + begin, to.data<T>() + end, same);
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

void add(const Tensor& out, const Tensor& a, const Tensor& b, const Stream& stream) {
  check("add", {{"out", out}, {"a", a}, {"b", b}}, alike(out, a) && alike(out, b) && alike(a, b),
        Rows::any_stride);
  if (const auto* d = on_device("add", out, stream)) return d->add(out, a, b, stream);
  check_dtype("add", out.dtype(), {{"a", a}, {"b", b}});
  const auto part = [](std::size_t begin, std::size_t end, const Tensor& to, const Tensor& x,
                       const Tensor& y) {
    HWY_DYNAMIC_DISPATCH(add)
    (to, x, y, begin, end);
  };
  each_range(stream, part, out, a, b);
}

void multiply(const Tensor& out, const Tensor& a, const Tensor& b, const Stream& stream) {
  check("multiply", {{"out", out}, {"a", a}, {"b", b}}, alike(out, a) && alike(out, b) && alike(a, b),
        Rows::any_stride);
  if (const auto* d = on_device("multiply", out, stream)) return d->multiply(out, a, b, stream);
  check_dtype("multiply", out.dtype(), {{"a", a}, {"b", b}});
  const auto part = [](std::size_t begin, std::size_t end, const Tensor& to, const Tensor& x,
                       const Tensor& y) {
    HWY_DYNAMIC_DISPATCH(multiply)
    (to, x, y, begin, end);
  };
  each_range(stream, part, out, a, b);
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

void relu(const Tensor& out, const Tensor& in, const Stream& stream) {
  check("relu", {{"out", out}, {"in", in}}, out.count() == in.count());
  if (const auto* d = on_device("relu", out, stream)) return d->relu(out, in, stream);
  check_dtype("relu", out.dtype(), {{"in", in}});
  stream.parallel_for(out.count(), grain, [&](std::size_t begin, std::size_t end) {
    HWY_DYNAMIC_DISPATCH(relu)(out, in, begin, end);
  });
}

void relu_backward(const Tensor& d_in, const Tensor& d_out, const Tensor& in, Into into,
                   const Stream& stream) {
  check("relu_backward", {{"d_in", d_in}, {"d_out", d_out}, {"in", in}},
        d_in.count() == in.count() && d_out.count() == in.count());
  if (const auto* d = on_device("relu_backward", d_in, stream))
    return d->relu_backward(d_in, d_out, in, into, stream);
  check_dtype("relu_backward", d_in.dtype(), {{"d_out", d_out}, {"in", in}});
  stream.parallel_for(in.count(), grain, [&](std::size_t begin, std::size_t end) {
    HWY_DYNAMIC_DISPATCH(relu_backward)(d_in, d_out, in, into == Into::accumulate, begin, end);
  });
}

void tanh(const Tensor& out, const Tensor& in, const Stream& stream) {
  check("tanh", {{"out", out}, {"in", in}}, out.count() == in.count());
  if (const auto* d = on_device("tanh", out, stream)) return d->tanh(out, in, stream);
  check_dtype("tanh", out.dtype(), {{"in", in}});
  stream.parallel_for(out.count(), grain, [&](std::size_t begin, std::size_t end) {
    HWY_DYNAMIC_DISPATCH(tanh)(out, in, begin, end);
  });
}

void tanh_backward(const Tensor& d_in, const Tensor& d_out, const Tensor& out, Into into,
                   const Stream& stream) {
  check("tanh_backward", {{"d_in", d_in}, {"d_out", d_out}, {"out", out}},
        d_in.count() == out.count() && d_out.count() == out.count());
  if (const auto* d = on_device("tanh_backward", d_in, stream))
    return d->tanh_backward(d_in, d_out, out, into, stream);
  check_dtype("tanh_backward", d_in.dtype(), {{"d_out", d_out}, {"out", out}});
  stream.parallel_for(out.count(), grain, [&](std::size_t begin, std::size_t end) {
    HWY_DYNAMIC_DISPATCH(tanh_backward)(d_in, d_out, out, into == Into::accumulate, begin, end);
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
  stream.parallel_for(a.count(), grain, [&](std::size_t begin, std::size_t end) {
    HWY_DYNAMIC_DISPATCH(scaled_difference)(d_a, a, b, factor, into == Into::accumulate, begin, end);
  });
}

}  // namespace ops
}  // namespace rz
#endif
