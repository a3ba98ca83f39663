#pragma once
/// Ranges of elements of several tensors, which threads share.

#include <algorithm>
#include <cstddef>

#include "comm/device/stream.h"
#include "tensor/kernels/check.h"

namespace rz::ops {

inline constexpr std::size_t elements_per_thread = 4096;  // at least

/// Row r of a tensor that has, or is read as having, rows of n elements.
inline Tensor row_of(const Tensor& t, std::size_t r, std::size_t n) {
  const std::size_t stride = t.contiguous() ? n : t.row_stride();
  return Tensor::borrow(t.raw() + r * stride * size_of(t.dtype()), {n}, t.dtype(), t.device());
}

/// Calls f(begin, end, tensors…) on ranges of all elements, row by row where a tensor has a row stride.
template <class F, class... T>
void each_range(const Stream& stream, const F& f, const Tensor& out, const T&... in) {
  if (out.contiguous() && (in.contiguous() && ...))
    return stream.parallel_for(out.count(), elements_per_thread,
                               [&](std::size_t begin, std::size_t end) { f(begin, end, out, in...); });
  const std::size_t n = last(out), rows_per_thread = std::max<std::size_t>(1, elements_per_thread / n);
  stream.parallel_for(rows(out), rows_per_thread, [&](std::size_t begin, std::size_t end) {
    for (std::size_t r = begin; r < end; ++r) f(0, n, row_of(out, r, n), row_of(in, r, n)...);
  });
}

/// Both have one count, and the same rows if one of them has a row stride.
inline bool alike(const Tensor& a, const Tensor& b) {
  return a.contiguous() && b.contiguous() ? a.count() == b.count() : same_rows(a, b);
}

}  // namespace rz::ops
