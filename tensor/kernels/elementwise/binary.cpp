// Operators of two tensors, and of three, that may be broadcast. A thread takes tiles of the output; an
// operand that is not consecutive there is copied to a buffer in the first-level cache, so that one loop
// serves every broadcast.

#include "tensor/element_ops.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tensor/kernels/elementwise/binary.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "tensor/kernels/broadcast.h"
#include "tensor/kernels/check.h"
#include "tensor/kernels/device_ops.h"
#include "tensor/kernels/elementwise/functions-inl.h"
#include "tensor/kernels/elementwise/ranges.h"

HWY_BEFORE_NAMESPACE();
namespace rz {
namespace HWY_NAMESPACE {

template <class T>
const T* as(const std::byte* p) {
  return reinterpret_cast<const T*>(p);
}
template <class T>
T* as(std::byte* p) {
  return reinterpret_cast<T*>(p);
}

template <class F>
void map_binary(DType dtype, std::byte* out, const std::byte* a, const std::byte* b, std::size_t n) {
  ops::dispatch_dtype(dtype, [&](auto t) HWY_ATTR {
    using T = decltype(t);
    map(
        as<T>(out), n, [](auto x, auto y) HWY_ATTR { return F::value(x, y); }, as<T>(a), as<T>(b));
  });
}
template <class F>
void map_gradient(int operand, DType dtype, std::byte* d, const std::byte* d_out, const std::byte* a,
                  const std::byte* b, std::size_t n) {
  ops::dispatch_dtype(dtype, [&](auto t) HWY_ATTR {
    using T = decltype(t);
    const auto first = [](auto dy, auto x, auto y) HWY_ATTR { return F::first(dy, x, y); };
    const auto second = [](auto dy, auto x, auto y) HWY_ATTR { return F::second(dy, x, y); };
    if (operand == 0)
      map(as<T>(d), n, first, as<T>(d_out), as<T>(a), as<T>(b));
    else
      map(as<T>(d), n, second, as<T>(d_out), as<T>(a), as<T>(b));
  });
}

void binary(ops::Binary op, DType dtype, std::byte* out, const std::byte* a, const std::byte* b,
            std::size_t n) {
  switch (op) {
#define RZ_BINARY(name)   \
  case ops::Binary::name: \
    return map_binary<functions::name>(dtype, out, a, b, n);
#include "tensor/element_ops.inc"
  }
}
void binary_backward(ops::Binary op, int operand, DType dtype, std::byte* d, const std::byte* d_out,
                     const std::byte* a, const std::byte* b, std::size_t n) {
  switch (op) {
#define RZ_BINARY(name)   \
  case ops::Binary::name: \
    return map_gradient<functions::name>(operand, dtype, d, d_out, a, b, n);
#include "tensor/element_ops.inc"
  }
}
void where(DType dtype, std::byte* out, const std::byte* condition, const std::byte* a, const std::byte* b,
           std::size_t n) {
  const auto select = [](auto c, auto x, auto y)
                          HWY_ATTR { return hn::IfThenElse(hn::Eq(c, hn::Zero(Floats())), y, x); };
  ops::dispatch_dtype(dtype, [&](auto t) HWY_ATTR {
    using T = decltype(t);
    map(as<T>(out), n, select, as<T>(condition), as<T>(a), as<T>(b));
  });
}
void expand(float factor, bool accumulate, DType dtype, std::byte* out, const std::byte* in, std::size_t n) {
  ops::dispatch_dtype(dtype, [&](auto t) HWY_ATTR {
    using T = decltype(t);
    const auto scaled = [&](auto x) HWY_ATTR { return hn::Mul(hn::Set(Floats(), factor), x); };
    map_into(accumulate, as<T>(out), n, scaled, as<T>(in));
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace rz
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace rz {

HWY_EXPORT(binary);
HWY_EXPORT(binary_backward);
HWY_EXPORT(where);
HWY_EXPORT(expand);

namespace ops {

namespace {

constexpr std::size_t tile = 1024;
struct Buffer {
  alignas(64) std::array<std::byte, tile * sizeof(float)> bytes;
};

/// Calls f(begin, count) on tiles of n elements, where a thread has up to `buffers` of them.
template <int buffers, class F>
void each_tile(std::size_t n, const Stream& stream, const F& f) {
  stream.parallel_for(n, elements_per_thread, [&](std::size_t begin, std::size_t end) {
    std::array<Buffer, buffers> memory;
    for (std::size_t at = begin; at < end; at += tile) f(at, std::min(tile, end - at), memory);
  });
}

bool all_alike(const Tensor& out, const Tensor& a, const Tensor& b) {
  return alike(out, a) && alike(out, b) && alike(a, b);
}

/// Whether broadcast_shapes() would succeed with this result.
template <class... Shapes>
bool broadcast_to(const Shape& out, const Shapes&... in) {
  if (!(broadcasts(in, out) && ...)) return false;
  for (int d = 1; d <= out.dims(); ++d) {
    const auto has_extent = [&](const Shape& s) { return d <= s.dims() && s[-d] == out[-d]; };
    if (!(has_extent(in) || ...) && out[-d] != 1) return false;
  }
  return true;
}

}  // namespace

const char* name_of(Binary op) {
  static constexpr const char* names[] = {
#define RZ_BINARY(name) #name,
#include "tensor/element_ops.inc"
  };
  return names[static_cast<int>(op)];
}

bool is_comparison(Binary op) {
  static constexpr bool values[] = {
#define RZ_BINARY(name) false,
#define RZ_COMPARISON(name) true,
#include "tensor/element_ops.inc"
  };
  return values[static_cast<int>(op)];
}

Shape broadcast_shapes(const char* op, const Shape& a, const Shape& b) {
  const int dims = std::max(a.dims(), b.dims());
  std::array<std::size_t, 4> extents{};
  for (int d = 1; d <= dims; ++d) {
    const std::size_t m = d <= a.dims() ? a[-d] : 1, n = d <= b.dims() ? b[-d] : 1;
    if (m != n && m != 1 && n != 1)
      fail(Errc::invalid_argument, op, ": the shapes ", name(a), " and ", name(b),
           " do not broadcast: the extents ", m, " and ", n, " differ, and none of them is 1");
    extents[static_cast<std::size_t>(dims - d)] = m == 1 ? n : m;
  }
  return Shape(std::span<const std::size_t>(extents.data(), static_cast<std::size_t>(dims)));
}

void binary(const Tensor& out, const Tensor& a, const Tensor& b, Binary op, const Stream& stream) {
  const char* const name = name_of(op);
  const bool flat = all_alike(out, a, b);
  check(name, {{"out", out}, {"a", a}, {"b", b}}, flat || broadcast_to(out.shape(), a.shape(), b.shape()),
        flat ? Rows::any_stride : Rows::contiguous);
  if (const auto* d = on_device(name, out, stream)) return d->binary(out, a, b, op, stream);
  check_dtype(name, out.dtype(), {{"a", a}, {"b", b}});
  const DType dtype = out.dtype();
  const std::size_t size = size_of(dtype);
  if (flat) {
    const auto part = [&](std::size_t begin, std::size_t end, const Tensor& to, const Tensor& x,
                          const Tensor& y) {
      const std::size_t at = begin * size;
      HWY_DYNAMIC_DISPATCH(binary)(op, dtype, to.raw() + at, x.raw() + at, y.raw() + at, end - begin);
    };
    return each_range(stream, part, out, a, b);
  }
  const BroadcastOperand x(a, out.shape()), y(b, out.shape());
  each_tile<2>(out.count(), stream, [&](std::size_t begin, std::size_t n, auto& memory) {
    const std::byte *const p = x.read(begin, n, memory[0].bytes.data()), *const q =
                                                                             y.read(begin, n,
                                                                                    memory[1].bytes.data());
    HWY_DYNAMIC_DISPATCH(binary)(op, dtype, out.raw() + begin * size, p, q, n);
  });
}

void binary_backward(const Tensor& d, const Tensor& d_out, const Tensor& a, const Tensor& b, Binary op,
                     int operand, const Stream& stream) {
  const std::string name = concat(name_of(op), "_backward");
  check(name.c_str(), {{"d", d}, {"d_out", d_out}, {"a", a}, {"b", b}},
        d.count() == d_out.count() && broadcast_to(d_out.shape(), a.shape(), b.shape()));
  if (const auto* device = on_device(name.c_str(), d, stream))
    return device->binary_backward(d, d_out, a, b, op, operand, stream);
  check_dtype(name.c_str(), d.dtype(), {{"d_out", d_out}, {"a", a}, {"b", b}});
  const std::size_t size = size_of(d.dtype());
  const BroadcastOperand x(a, d_out.shape()), y(b, d_out.shape());
  each_tile<2>(d.count(), stream, [&](std::size_t begin, std::size_t n, auto& memory) {
    const std::byte *const p = x.read(begin, n, memory[0].bytes.data()), *const q =
                                                                             y.read(begin, n,
                                                                                    memory[1].bytes.data());
    HWY_DYNAMIC_DISPATCH(binary_backward)
    (op, operand, d.dtype(), d.raw() + begin * size, d_out.raw() + begin * size, p, q, n);
  });
}

void where(const Tensor& out, const Tensor& condition, const Tensor& a, const Tensor& b,
           const Stream& stream) {
  check("where", {{"out", out}, {"condition", condition}, {"a", a}, {"b", b}},
        broadcast_to(out.shape(), condition.shape(), a.shape(), b.shape()));
  if (const auto* d = on_device("where", out, stream)) return d->where(out, condition, a, b, stream);
  check_dtype("where", out.dtype(), {{"condition", condition}, {"a", a}, {"b", b}});
  const BroadcastOperand c(condition, out.shape()), x(a, out.shape()), y(b, out.shape());
  each_tile<3>(out.count(), stream, [&](std::size_t begin, std::size_t n, auto& memory) {
    const auto read = [&](const BroadcastOperand& operand, std::size_t i) {
      return operand.read(begin, n, memory[i].bytes.data());
    };
    HWY_DYNAMIC_DISPATCH(where)
    (out.dtype(), out.raw() + begin * size_of(out.dtype()), read(c, 0), read(x, 1), read(y, 2), n);
  });
}

void expand(const Tensor& out, const Tensor& in, float factor, Into into, const Stream& stream) {
  check("expand", {{"out", out}, {"in", in}}, broadcasts(in.shape(), out.shape()));
  if (const auto* d = on_device("expand", out, stream)) return d->expand(out, in, factor, into, stream);
  check_dtype("expand", out.dtype(), {{"in", in}});
  const BroadcastOperand x(in, out.shape());
  each_tile<1>(out.count(), stream, [&](std::size_t begin, std::size_t n, auto& memory) {
    HWY_DYNAMIC_DISPATCH(expand)
    (factor, into == Into::accumulate, out.dtype(), out.raw() + begin * size_of(out.dtype()),
     x.read(begin, n, memory[0].bytes.data()), n);
  });
}

}  // namespace ops
}  // namespace rz
#endif
