// silu(gate) · up in one pass, and both gradients in one. What silu() and mul() would store in between is
// rounded as they round it, so that their bits are the same.

#include "tensor/ops.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tensor/kernels/elementwise/swiglu.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "tensor/kernels/check.h"
#include "tensor/kernels/device_ops.h"
#include "tensor/kernels/elementwise/functions-inl.h"
#include "tensor/kernels/elementwise/ranges.h"

HWY_BEFORE_NAMESPACE();
namespace rz {
namespace HWY_NAMESPACE {

void swiglu(const Tensor& out, const Tensor& gate, const Tensor& up, std::size_t begin, std::size_t end) {
  ops::dispatch_dtype(out.dtype(), [&](auto t) HWY_ATTR {
    using T = decltype(t);
    const auto f = [](auto g, auto u)
                       HWY_ATTR { return hn::Mul(rounded<T>(Floats(), functions::silu::value(g)), u); };
    map(elements<T>(out) + begin, end - begin, f, elements<const T>(gate) + begin,
        elements<const T>(up) + begin);
  });
}

/// A gradient that is written, or added to, if it is there.
template <class T>
struct Gradient {
  T* at;
  bool accumulate;

  HWY_INLINE void write(FloatVector d, std::size_t i) const {
    if (at) store(accumulate ? hn::Add(load(Floats(), at + i), d) : d, Floats(), at + i);
  }
  HWY_INLINE void write_part(FloatVector d, std::size_t i, std::size_t n) const {
    if (at)
      store_part(accumulate ? hn::Add(load_part(Floats(), at + i, n, 0.0f), d) : d, Floats(), at + i, n);
  }
};

template <class T>
HWY_INLINE void swiglu_gradients(Gradient<T> d_gate, Gradient<T> d_up, const T* d_out, const T* gate,
                                 const T* up, std::size_t n) {
  const Floats d;
  const std::size_t lanes = hn::Lanes(d);
  const auto of_up = [](auto dy, auto g)
                         HWY_ATTR { return hn::Mul(dy, rounded<T>(Floats(), functions::silu::value(g))); };
  const auto of_gate = [](auto dy, auto g, auto u) HWY_ATTR {
    return functions::silu::gradient(rounded<T>(Floats(), hn::Mul(dy, u)), g);
  };
  std::size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const FloatVector dy = load(d, d_out + i), g = load(d, gate + i), u = load(d, up + i);
    d_up.write(of_up(dy, g), i);
    d_gate.write(of_gate(dy, g, u), i);
  }
  if (i == n) return;
  const std::size_t left = n - i;
  const auto part = [&](const T* from) HWY_ATTR { return load_part(d, from + i, left, 0.0f); };
  const FloatVector dy = part(d_out), g = part(gate), u = part(up);
  d_up.write_part(of_up(dy, g), i, left);
  d_gate.write_part(of_gate(dy, g, u), i, left);
}

void swiglu_backward(const Tensor& d_gate, const Tensor& d_up, const Tensor& d_out, const Tensor& gate,
                     const Tensor& up, bool accumulate_gate, bool accumulate_up, std::size_t begin,
                     std::size_t end) {
  ops::dispatch_dtype(d_out.dtype(), [&](auto t) HWY_ATTR {
    using T = decltype(t);
    const auto target = [&](const Tensor& d, bool accumulate) {
      return Gradient<T>{d.defined() ? elements<T>(d) + begin : nullptr, accumulate};
    };
    swiglu_gradients(target(d_gate, accumulate_gate), target(d_up, accumulate_up),
                     elements<const T>(d_out) + begin, elements<const T>(gate) + begin,
                     elements<const T>(up) + begin, end - begin);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace rz
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace rz {

HWY_EXPORT(swiglu);
HWY_EXPORT(swiglu_backward);

namespace ops {

void swiglu(const Tensor& out, const Tensor& gate, const Tensor& up, const Stream& stream) {
  check("swiglu", {{"out", out}, {"gate", gate}, {"up", up}},
        out.count() == gate.count() && gate.count() == up.count());
  if (const auto* d = on_device("swiglu", out, stream)) return d->swiglu(out, gate, up, stream);
  check_dtype("swiglu", out.dtype(), {{"gate", gate}, {"up", up}});
  stream.parallel_for(out.count(), elements_per_thread, [&](std::size_t begin, std::size_t end) {
    HWY_DYNAMIC_DISPATCH(swiglu)(out, gate, up, begin, end);
  });
}

void swiglu_backward(const Tensor& d_gate, const Tensor& d_up, const Tensor& d_out, const Tensor& gate,
                     const Tensor& up, Into into_gate, Into into_up, const Stream& stream) {
  constexpr const char* op = "swiglu_backward";
  check(op, {{"d_out", d_out}, {"gate", gate}, {"up", up}},
        d_out.count() == gate.count() && gate.count() == up.count());
  for (const auto& [what, d] : {std::pair("d_gate", d_gate), std::pair("d_up", d_up)})
    if (d.defined()) check(op, {{what, d}, {"d_out", d_out}}, d.count() == d_out.count());
  if (const auto* device = on_device(op, d_out, stream))
    return device->swiglu_backward(d_gate, d_up, d_out, gate, up, into_gate, into_up, stream);
  check_dtype(op, d_out.dtype(), {{"gate", gate}, {"up", up}});
  for (const auto& [what, d] : {std::pair("d_gate", d_gate), std::pair("d_up", d_up)})
    if (d.defined()) check_dtype(op, d_out.dtype(), {{what, d}});
  stream.parallel_for(d_out.count(), elements_per_thread, [&](std::size_t begin, std::size_t end) {
    HWY_DYNAMIC_DISPATCH(swiglu_backward)
    (d_gate, d_up, d_out, gate, up, into_gate == Into::accumulate, into_up == Into::accumulate, begin, end);
  });
}

}  // namespace ops
}  // namespace rz
#endif
