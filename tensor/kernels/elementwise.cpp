#include "tensor/ops.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tensor/kernels/elementwise.cpp"
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
}

void fill(const Tensor& out, float value, const Stream& stream) {
  check("fill", {{"out", out}}, true);
  if (const auto* d = on_device("fill", out, stream)) return d->fill(out, value, stream);
  dispatch_dtype(out.dtype(), [&](auto t) {
    using T = decltype(t);
    T* o = out.data<T>();
    const T same = from_f32<T>(value);
    stream.parallel_for(out.count(), grain,
                        [&](std::size_t begin, std::size_t end) { std::fill(o + begin, o + end, same); });
  });
}

void copy(const Tensor& out, const Tensor& in, const Stream& stream) {
  check("copy", {{"out", out}, {"in", in}}, out.count() == in.count());
  if (const auto* d = on_device("copy", out, stream)) return d->copy(out, in, stream);
  stream.parallel_for(out.count(), grain, [&](std::size_t begin, std::size_t end) {
    const std::size_t size = size_of(in.dtype());
    if (out.dtype() == in.dtype())
      std::copy(in.raw() + begin * size, in.raw() + end * size, out.raw() + begin * size);
    else
      HWY_DYNAMIC_DISPATCH(convert)(out, in, begin, end);
  });
}

void add(const Tensor& out, const Tensor& a, const Tensor& b, const Stream& stream) {
  check("add", {{"out", out}, {"a", a}, {"b", b}}, out.count() == a.count() && a.count() == b.count());
  if (const auto* d = on_device("add", out, stream)) return d->add(out, a, b, stream);
  check_dtype("add", out.dtype(), {{"a", a}, {"b", b}});
  stream.parallel_for(out.count(), grain, [&](std::size_t begin, std::size_t end) {
    HWY_DYNAMIC_DISPATCH(add)(out, a, b, begin, end);
  });
}

void multiply(const Tensor& out, const Tensor& a, const Tensor& b, const Stream& stream) {
  check("multiply", {{"out", out}, {"a", a}, {"b", b}}, out.count() == a.count() && a.count() == b.count());
  if (const auto* d = on_device("multiply", out, stream)) return d->multiply(out, a, b, stream);
  check_dtype("multiply", out.dtype(), {{"a", a}, {"b", b}});
  stream.parallel_for(out.count(), grain, [&](std::size_t begin, std::size_t end) {
    HWY_DYNAMIC_DISPATCH(multiply)(out, a, b, begin, end);
  });
}

void add_scaled(const Tensor& out, const Tensor& in, float factor, const Stream& stream) {
  check("add_scaled", {{"out", out}, {"in", in}}, out.count() == in.count());
  if (const auto* d = on_device("add_scaled", out, stream)) return d->add_scaled(out, in, factor, stream);
  check_dtype("add_scaled", out.dtype(), {{"in", in}});
  stream.parallel_for(out.count(), grain, [&](std::size_t begin, std::size_t end) {
    HWY_DYNAMIC_DISPATCH(scale)(out, in, factor, true, begin, end);
  });
}

void scale(const Tensor& out, const Tensor& in, float factor, const Stream& stream) {
  check("scale", {{"out", out}, {"in", in}}, out.count() == in.count());
  if (const auto* d = on_device("scale", out, stream)) return d->scale(out, in, factor, stream);
  check_dtype("scale", out.dtype(), {{"in", in}});
  stream.parallel_for(out.count(), grain, [&](std::size_t begin, std::size_t end) {
    HWY_DYNAMIC_DISPATCH(scale)(out, in, factor, false, begin, end);
  });
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
