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

void add(float* out, const float* a, const float* b, std::size_t n) { RZ_EACH(i, 0, n) out[i] = a[i] + b[i]; }
void multiply(float* out, const float* a, const float* b, std::size_t n) {
  RZ_EACH(i, 0, n) out[i] = a[i] * b[i];
}
void add_scaled(float* out, const float* in, float factor, std::size_t n) {
  RZ_EACH(i, 0, n) out[i] += factor * in[i];
}
void scale(float* out, const float* in, float factor, std::size_t n) {
  RZ_EACH(i, 0, n) out[i] = factor * in[i];
}
void relu(float* out, const float* in, std::size_t n) {
  RZ_EACH(i, 0, n) out[i] = in[i] < 0 ? 0 : in[i];  // NaN stays NaN
}
void relu_backward(float* d_in, const float* d_out, const float* in, bool accumulate, std::size_t n) {
  if (accumulate)
    RZ_EACH(i, 0, n) d_in[i] += in[i] > 0 ? d_out[i] : 0;
  else
    RZ_EACH(i, 0, n) d_in[i] = in[i] > 0 ? d_out[i] : 0;
}
void tanh(float* out, const float* in, std::size_t n) {
  map(
      out, n, [](auto x) HWY_ATTR { return hyperbolic_tangent(x); }, in);
}
void tanh_backward(float* d_in, const float* d_out, const float* out, bool accumulate, std::size_t n) {
  if (accumulate)
    RZ_EACH(i, 0, n) d_in[i] += d_out[i] * ((1 - out[i]) * (1 + out[i]));
  else
    RZ_EACH(i, 0, n) d_in[i] = d_out[i] * ((1 - out[i]) * (1 + out[i]));
}
void scaled_difference(float* out, const float* a, const float* b, float factor, bool accumulate,
                       std::size_t n) {
  if (accumulate)
    RZ_EACH(i, 0, n) out[i] += factor * (a[i] - b[i]);
  else
    RZ_EACH(i, 0, n) out[i] = factor * (a[i] - b[i]);
}
double squared_error(const float* a, const float* b, std::size_t n) {
  const auto squared = [](auto x, auto y) HWY_ATTR {
    const auto difference = hn::Sub(x, y);
    return hn::Mul(difference, difference);
  };
  return sum(n, squared, a, b);
}

}  // namespace HWY_NAMESPACE
}  // namespace rz
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace rz {

HWY_EXPORT(add);
HWY_EXPORT(multiply);
HWY_EXPORT(add_scaled);
HWY_EXPORT(scale);
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
  float* o = out.data<float>();
  stream.parallel_for(out.count(), grain,
                      [&](std::size_t begin, std::size_t end) { std::fill(o + begin, o + end, value); });
}

void copy(const Tensor& out, const Tensor& in, const Stream& stream) {
  check("copy", {{"out", out}, {"in", in}}, out.count() == in.count());
  if (const auto* d = on_device("copy", out, stream)) return d->copy(out, in, stream);
  float* o = out.data<float>();
  const float* x = in.data<float>();
  stream.parallel_for(out.count(), grain,
                      [&](std::size_t begin, std::size_t end) { std::copy(x + begin, x + end, o + begin); });
}

void add(const Tensor& out, const Tensor& a, const Tensor& b, const Stream& stream) {
  check("add", {{"out", out}, {"a", a}, {"b", b}}, out.count() == a.count() && a.count() == b.count());
  if (const auto* d = on_device("add", out, stream)) return d->add(out, a, b, stream);
  float* o = out.data<float>();
  const float *x = a.data<float>(), *y = b.data<float>();
  stream.parallel_for(out.count(), grain, [&](std::size_t begin, std::size_t end) {
    HWY_DYNAMIC_DISPATCH(add)(o + begin, x + begin, y + begin, end - begin);
  });
}

void multiply(const Tensor& out, const Tensor& a, const Tensor& b, const Stream& stream) {
  check("multiply", {{"out", out}, {"a", a}, {"b", b}}, out.count() == a.count() && a.count() == b.count());
  if (const auto* d = on_device("multiply", out, stream)) return d->multiply(out, a, b, stream);
  float* o = out.data<float>();
  const float *x = a.data<float>(), *y = b.data<float>();
  stream.parallel_for(out.count(), grain, [&](std::size_t begin, std::size_t end) {
    HWY_DYNAMIC_DISPATCH(multiply)(o + begin, x + begin, y + begin, end - begin);
  });
}

void add_scaled(const Tensor& out, const Tensor& in, float factor, const Stream& stream) {
  check("add_scaled", {{"out", out}, {"in", in}}, out.count() == in.count());
  if (const auto* d = on_device("add_scaled", out, stream)) return d->add_scaled(out, in, factor, stream);
  float* o = out.data<float>();
  const float* x = in.data<float>();
  stream.parallel_for(out.count(), grain, [&](std::size_t begin, std::size_t end) {
    HWY_DYNAMIC_DISPATCH(add_scaled)(o + begin, x + begin, factor, end - begin);
  });
}

void scale(const Tensor& out, const Tensor& in, float factor, const Stream& stream) {
  check("scale", {{"out", out}, {"in", in}}, out.count() == in.count());
  if (const auto* d = on_device("scale", out, stream)) return d->scale(out, in, factor, stream);
  float* o = out.data<float>();
  const float* x = in.data<float>();
  stream.parallel_for(out.count(), grain, [&](std::size_t begin, std::size_t end) {
    HWY_DYNAMIC_DISPATCH(scale)(o + begin, x + begin, factor, end - begin);
  });
}

void relu(const Tensor& out, const Tensor& in, const Stream& stream) {
  check("relu", {{"out", out}, {"in", in}}, out.count() == in.count());
  if (const auto* d = on_device("relu", out, stream)) return d->relu(out, in, stream);
  float* o = out.data<float>();
  const float* x = in.data<float>();
  stream.parallel_for(out.count(), grain, [&](std::size_t begin, std::size_t end) {
    HWY_DYNAMIC_DISPATCH(relu)(o + begin, x + begin, end - begin);
  });
}

void relu_backward(const Tensor& d_in, const Tensor& d_out, const Tensor& in, Into into,
                   const Stream& stream) {
  check("relu_backward", {{"d_in", d_in}, {"d_out", d_out}, {"in", in}},
        d_in.count() == in.count() && d_out.count() == in.count());
  if (const auto* d = on_device("relu_backward", d_in, stream))
    return d->relu_backward(d_in, d_out, in, into, stream);
  float* dx = d_in.data<float>();
  const float *dy = d_out.data<float>(), *x = in.data<float>();
  stream.parallel_for(in.count(), grain, [&](std::size_t begin, std::size_t end) {
    HWY_DYNAMIC_DISPATCH(relu_backward)
    (dx + begin, dy + begin, x + begin, into == Into::accumulate, end - begin);
  });
}

void tanh(const Tensor& out, const Tensor& in, const Stream& stream) {
  check("tanh", {{"out", out}, {"in", in}}, out.count() == in.count());
  if (const auto* d = on_device("tanh", out, stream)) return d->tanh(out, in, stream);
  float* o = out.data<float>();
  const float* x = in.data<float>();
  stream.parallel_for(out.count(), grain, [&](std::size_t begin, std::size_t end) {
    HWY_DYNAMIC_DISPATCH(tanh)(o + begin, x + begin, end - begin);
  });
}

void tanh_backward(const Tensor& d_in, const Tensor& d_out, const Tensor& out, Into into,
                   const Stream& stream) {
  check("tanh_backward", {{"d_in", d_in}, {"d_out", d_out}, {"out", out}},
        d_in.count() == out.count() && d_out.count() == out.count());
  if (const auto* d = on_device("tanh_backward", d_in, stream))
    return d->tanh_backward(d_in, d_out, out, into, stream);
  float* dx = d_in.data<float>();
  const float *dy = d_out.data<float>(), *y = out.data<float>();
  stream.parallel_for(out.count(), grain, [&](std::size_t begin, std::size_t end) {
    HWY_DYNAMIC_DISPATCH(tanh_backward)
    (dx + begin, dy + begin, y + begin, into == Into::accumulate, end - begin);
  });
}

void mean_squared_error(const Tensor& loss, const Tensor& a, const Tensor& b, const Stream& stream) {
  check("mean_squared_error", {{"loss", loss}, {"a", a}, {"b", b}},
        loss.count() == 1 && a.count() == b.count());
  if (const auto* d = on_device("mean_squared_error", a, stream))
    return d->mean_squared_error(loss, a, b, stream);
  const float *x = a.data<float>(), *y = b.data<float>();
  const double sum = ordered_sum(a.count(), stream, [&](std::size_t begin, std::size_t end) {
    return HWY_DYNAMIC_DISPATCH(squared_error)(x + begin, y + begin, end - begin);
  });
  *loss.data<float>() = static_cast<float>(sum / static_cast<double>(std::max<std::size_t>(1, a.count())));
}

void mean_squared_error_backward(const Tensor& d_a, const Tensor& d_loss, const Tensor& a, const Tensor& b,
                                 Into into, const Stream& stream) {
  check("mean_squared_error_backward", {{"d_a", d_a}, {"d_loss", d_loss}, {"a", a}, {"b", b}},
        d_a.count() == a.count() && d_loss.count() == 1 && a.count() == b.count());
  if (const auto* d = on_device("mean_squared_error_backward", a, stream))
    return d->mean_squared_error_backward(d_a, d_loss, a, b, into, stream);
  const double count = static_cast<double>(std::max<std::size_t>(1, a.count()));
  const auto factor = static_cast<float>(2.0 * *d_loss.data<float>() / count);
  float* dx = d_a.data<float>();
  const float *x = a.data<float>(), *y = b.data<float>();
  stream.parallel_for(a.count(), grain, [&](std::size_t begin, std::size_t end) {
    HWY_DYNAMIC_DISPATCH(scaled_difference)
    (dx + begin, x + begin, y + begin, factor, into == Into::accumulate, end - begin);
  });
}

}  // namespace ops
}  // namespace rz
#endif
