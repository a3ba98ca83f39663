// Transpositions of blocks in registers. Compiled once per target, like tensor/kernels/vector-inl.h.
#if defined(RZ_TENSOR_TRANSPOSE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef RZ_TENSOR_TRANSPOSE_INL_H_
#undef RZ_TENSOR_TRANSPOSE_INL_H_
#else
#define RZ_TENSOR_TRANSPOSE_INL_H_
#endif

#include "tensor/kernels/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace rz {
namespace HWY_NAMESPACE {

#if !HWY_HAVE_SCALABLE && HWY_TARGET != HWY_SCALAR
/// The blocks of 128 bits at p, p + step, p + 2 · step, …
template <class D, class T>
HWY_INLINE hn::Vec<D> load_blocks(D d, const T* p, std::size_t step) {
  if constexpr (sizeof(T) * hn::MaxLanes(D()) <= 16) {
    return hn::LoadU(d, p);
  } else {
    const hn::Half<D> half;
    const std::size_t blocks = sizeof(T) * hn::MaxLanes(D()) / 32;
    return hn::Combine(d, load_blocks(half, p + blocks * step, step), load_blocks(half, p, step));
  }
}

/// Each block of n vectors has n lanes. Transposes the n x n matrices of blocks at the same place.
template <std::size_t n, class D>
HWY_INLINE void transpose_blocks(D d, hn::Vec<D>* v) {
  hn::Vec<D> lower[n / 2], upper[n / 2];
  for (std::size_t i = 0; i < n / 2; ++i) {
    lower[i] = hn::InterleaveLower(d, v[2 * i], v[2 * i + 1]);
    upper[i] = hn::InterleaveUpper(d, v[2 * i], v[2 * i + 1]);
  }
  if constexpr (n == 2) {
    v[0] = lower[0], v[1] = upper[0];
  } else {
    const hn::RepartitionToWide<D> wide;  // pairs of rows
    hn::Vec<decltype(wide)> first[n / 2], second[n / 2];
    for (std::size_t i = 0; i < n / 2; ++i)
      first[i] = hn::BitCast(wide, lower[i]), second[i] = hn::BitCast(wide, upper[i]);
    transpose_blocks<n / 2>(wide, first);
    transpose_blocks<n / 2>(wide, second);
    for (std::size_t i = 0; i < n / 2; ++i)
      v[i] = hn::BitCast(d, first[i]), v[n / 2 + i] = hn::BitCast(d, second[i]);
  }
}

/// Transposes as many rows as a vector has lanes, and the columns of 16 bytes.
template <class T>
HWY_INLINE void transpose_lanes(T* out, std::size_t out_stride, const T* in, std::size_t in_stride) {
  const hn::ScalableTag<T> d;
  constexpr std::size_t n = 16 / sizeof(T);
  hn::Vec<decltype(d)> v[n];
  for (std::size_t r = 0; r < n; ++r) v[r] = load_blocks(d, in + r * in_stride, n * in_stride);
  transpose_blocks<n>(d, v);
  for (std::size_t c = 0; c < n; ++c) hn::StoreU(v[c], d, out + c * out_stride);
}

/// Whole cache lines: `line` rows and columns. The rows are read into a buffer first: with a stride of a
/// power of two their lines displace each other in the cache before all of their columns are read.
template <class T>
HWY_INLINE void transpose_lines(T* out, std::size_t out_stride, const T* in, std::size_t in_stride) {
  constexpr std::size_t line = 64 / sizeof(T), n = 16 / sizeof(T);
  const hn::ScalableTag<T> d;
  const std::size_t lanes = hn::Lanes(d);
  HWY_ALIGN T rows[line * line];
  for (std::size_t r = 0; r < line; ++r)
    for (std::size_t c = 0; c < line; c += lanes)
      hn::Store(hn::LoadU(d, in + r * in_stride + c), d, rows + r * line + c);
  for (std::size_t c = 0; c < line; c += n)
    for (std::size_t r = 0; r < line; r += lanes)
      transpose_lanes(out + c * out_stride + r, out_stride, rows + r * line + c, line);
}
#else
template <class T>
HWY_INLINE void transpose_lines(T* out, std::size_t out_stride, const T* in, std::size_t in_stride) {
  constexpr std::size_t line = 64 / sizeof(T);
  for (std::size_t c = 0; c < line; ++c)
    for (std::size_t r = 0; r < line; ++r) out[c * out_stride + r] = in[r * in_stride + c];
}
#endif

}  // namespace HWY_NAMESPACE
}  // namespace rz
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
