// Operators of one tensor: a loop for all, with a function per name.

#include <cstring>
#include <type_traits>

#include "tensor/element_ops.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tensor/kernels/elementwise/unary.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "tensor/kernels/check.h"
#include "tensor/kernels/device_ops.h"
#include "tensor/kernels/elementwise/functions-inl.h"
#include "tensor/kernels/elementwise/ranges.h"

HWY_BEFORE_NAMESPACE();
namespace rz {
namespace HWY_NAMESPACE {

/// out[i] = F::bits(in[i]).
template <class F, class T>
HWY_INLINE void map_bits(T* out, const T* in, std::size_t n) {
  const hn::ScalableTag<std::int16_t> d;
  const std::size_t lanes = hn::Lanes(d);
  constexpr int infinity = std::is_same_v<T, bf16> ? 0x7f80 : 0x7c00;
  auto* const to = reinterpret_cast<std::int16_t*>(out);
  const auto* const from = reinterpret_cast<const std::int16_t*>(in);
  std::size_t i = 0;
  for (; i + lanes <= n; i += lanes) hn::StoreU(F::bits(d, hn::LoadU(d, from + i), infinity), d, to + i);
  if (i == n) return;
  HWY_ALIGN std::int16_t rest[hn::MaxLanes(d)] = {};
  std::memcpy(rest, from + i, (n - i) * sizeof(T));
  hn::Store(F::bits(d, hn::Load(d, rest), infinity), d, rest);
  std::memcpy(to + i, rest, (n - i) * sizeof(T));
}

template <class F>
concept HasBits = requires(hn::ScalableTag<std::int16_t> d) {
  F::bits(d, hn::Zero(d), 0);
};
template <class F>
concept HasFunctionsOf16Bits = requires(FloatVector x) {
  F::value_of_16_bits(x);
};
/// Functions, since a lambda may not name what its class lacks, even where it is not called.
template <class F, class V>
HWY_INLINE auto value_of_16_bits(V x) {
  return F::value_of_16_bits(x);
}
template <class F, class V>
HWY_INLINE auto gradient_of_16_bits(V dy, V x) {
  return F::gradient_of_16_bits(dy, x);
}

template <class F, class... Parameter>
void map_unary(const Tensor& out, const Tensor& in, std::size_t begin, std::size_t end, Parameter... p) {
  ops::dispatch_dtype(out.dtype(), [&](auto t) HWY_ATTR {
    using T = decltype(t);
    T* const to = elements<T>(out) + begin;
    const T* const from = elements<const T>(in) + begin;
    if constexpr (sizeof(T) == 2 && HasBits<F>)
      map_bits<F>(to, from, end - begin);
    else if constexpr (sizeof(T) == 2 && HasFunctionsOf16Bits<F>)
      map(
          to, end - begin, [](auto x) HWY_ATTR { return value_of_16_bits<F>(x); }, from);
    else
      map(
          to, end - begin, [=](auto x) HWY_ATTR { return F::value(x, p...); }, from);
  });
}
template <class F, class... Parameter>
void map_gradient(const Tensor& d_in, const Tensor& d_out, const Tensor& saved, bool accumulate,
                  std::size_t begin, std::size_t end, Parameter... p) {
  ops::dispatch_dtype(d_in.dtype(), [&](auto t) HWY_ATTR {
    using T = decltype(t);
    const auto f = [=](auto dy, auto x) HWY_ATTR {
      if constexpr (sizeof(T) == 2 && HasFunctionsOf16Bits<F>)
        return gradient_of_16_bits<F>(dy, x);
      else
        return F::gradient(dy, x, p...);
    };
    map_into(accumulate, elements<T>(d_in) + begin, end - begin, f, elements<const T>(d_out) + begin,
             elements<const T>(saved) + begin);
  });
}

void unary(ops::UnaryFunction f, const Tensor& out, const Tensor& in, std::size_t begin, std::size_t end) {
  switch (f.op) {
#define RZ_UNARY(name, saved, cast) \
  case ops::Unary::name:            \
    return map_unary<functions::name>(out, in, begin, end);
#define RZ_PARAMETRIC(name, saved, cast, parameter_) \
  case ops::Unary::name:                             \
    return map_unary<functions::name>(out, in, begin, end, f.parameter);
#include "tensor/element_ops.inc"
  }
}
void unary_backward(ops::UnaryFunction f, const Tensor& d_in, const Tensor& d_out, const Tensor& saved,
                    bool accumulate, std::size_t begin, std::size_t end) {
  switch (f.op) {
#define RZ_UNARY(name, saved_, cast) \
  case ops::Unary::name:             \
    return map_gradient<functions::name>(d_in, d_out, saved, accumulate, begin, end);
#define RZ_PARAMETRIC(name, saved_, cast, parameter_) \
  case ops::Unary::name:                              \
    return map_gradient<functions::name>(d_in, d_out, saved, accumulate, begin, end, f.parameter);
#include "tensor/element_ops.inc"
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace rz
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace rz {

HWY_EXPORT(unary);
HWY_EXPORT(unary_backward);

namespace ops {

const char* name_of(Unary op) {
  static constexpr const char* names[] = {
#define RZ_UNARY(name, saved, cast) #name,
#include "tensor/element_ops.inc"
  };
  return names[static_cast<int>(op)];
}

Saved saved_by(Unary op) {
  static constexpr Saved saved_values[] = {
#define RZ_UNARY(name, saved, cast) Saved::saved,
#include "tensor/element_ops.inc"
  };
  return saved_values[static_cast<int>(op)];
}

void unary(const Tensor& out, const Tensor& in, UnaryFunction f, const Stream& stream) {
  const char* const name = name_of(f.op);
  check(name, {{"out", out}, {"in", in}}, out.count() == in.count());
  if (const auto* d = on_device(name, out, stream)) return d->unary(out, in, f, stream);
  check_dtype(name, out.dtype(), {{"in", in}});
  stream.parallel_for(out.count(), elements_per_thread, [&](std::size_t begin, std::size_t end) {
    HWY_DYNAMIC_DISPATCH(unary)(f, out, in, begin, end);
  });
}

void unary_backward(const Tensor& d_in, const Tensor& d_out, const Tensor& saved, UnaryFunction f, Into into,
                    const Stream& stream) {
  const std::string name = concat(name_of(f.op), "_backward");
  check(name.c_str(), {{"d_in", d_in}, {"d_out", d_out}, {"saved", saved}},
        d_in.count() == saved.count() && d_out.count() == saved.count());
  if (const auto* d = on_device(name.c_str(), d_in, stream))
    return d->unary_backward(d_in, d_out, saved, f, into, stream);
  check_dtype(name.c_str(), d_in.dtype(), {{"d_out", d_out}, {"saved", saved}});
  stream.parallel_for(saved.count(), elements_per_thread, [&](std::size_t begin, std::size_t end) {
    HWY_DYNAMIC_DISPATCH(unary_backward)(f, d_in, d_out, saved, into == Into::accumulate, begin, end);
  });
}

}  // namespace ops
}  // namespace rz
#endif
