#pragma once
/// Loads and stores of rows as f32: 16 bytes at a time where the addresses permit it, otherwise single
/// elements. For .cu files.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "comm/core/math.h"

namespace rz::ops {

template <class T>
inline constexpr int pack_width = 16 / static_cast<int>(sizeof(T));

template <int n>
using Width = std::integral_constant<int, n>;

/// n elements accessed at once; up to 16 bytes take one instruction.
template <class T, int n>
struct alignas(n * sizeof(T) < 16 ? n * sizeof(T) : 16) Pack {
  T at[n];
};

template <int n, class T>
__device__ inline void load(float (&x)[n], const T* p) {
  const Pack<T, n> pack = *reinterpret_cast<const Pack<T, n>*>(p);
#pragma unroll
  for (int j = 0; j < n; ++j) x[j] = to_f32(pack.at[j]);
}

/// A pack in its memory format, in as few registers as possible.
template <class T, int n>
struct alignas(Pack<T, n>) Raw {
  using Word = std::conditional_t<sizeof(Pack<T, n>) % 4 == 0, std::uint32_t, std::uint16_t>;
  Word word[sizeof(Pack<T, n>) / sizeof(Word)];

  __device__ static Raw at(const T* p) {
#ifdef __CUDA_ARCH__
    return *reinterpret_cast<const Raw*>(p);
#else  // a host compiler's aliasing rules forbid the cast
    Raw raw;
    std::memcpy(&raw, p, sizeof raw);
    return raw;
#endif
  }
  __device__ void widen(float (&x)[n]) const {
    Pack<T, n> pack;
    std::memcpy(&pack, word, sizeof pack);
#pragma unroll
    for (int j = 0; j < n; ++j) x[j] = to_f32(pack.at[j]);
  }
  /// Prevents the compiler from keeping widened values across this point: they are recomputed.
  __device__ void hold() {
#ifdef __CUDA_ARCH__
#pragma unroll
    for (auto& w : word) asm volatile("" : "+r"(w));
#endif
  }
};

template <int n, class T>
__device__ inline void store(T* p, const float (&x)[n]) {
  Pack<T, n> pack;
#pragma unroll
  for (int j = 0; j < n; ++j) pack.at[j] = from_f32<T>(x[j]);
  *reinterpret_cast<Pack<T, n>*>(p) = pack;
}

/// Splits n elements into single elements up to an aligned address, packs of `width`, and single elements
/// again. Arrays with different alignments use single elements only.
template <int width>
struct Split {
  std::size_t n, head, packs;

  template <class T>
  RZ_HOST_DEVICE Split(std::size_t count, const T* p) : n(count) {
    const std::size_t into = reinterpret_cast<std::uintptr_t>(p) / sizeof(T) % width;
    head = (width - into) % width;
    if (head > n) head = n;
    packs = (n - head) / width;
  }
  /// Adds an array that is accessed with the same split.
  template <class T>
  RZ_HOST_DEVICE Split with(const T* p) const {
    Split s = *this;
    if (reinterpret_cast<std::uintptr_t>(p + head) % alignof(Pack<T, width>) != 0) s.head = n, s.packs = 0;
    return s;
  }
  RZ_HOST_DEVICE std::size_t tail() const { return head + packs * width; }
  /// Number of threads that get work.
  std::size_t threads() const {
    const std::size_t rest = n - tail(), larger = packs > head ? packs : head;
    return larger > rest ? larger : rest;
  }
};

/// Calls f(Width<k>, i), k = 1 or `width`, for those groups of elements i … i + k - 1 that belong to thread
/// `first` of `stride`.
template <int width, class F>
__device__ inline void each_pack(const Split<width>& s, std::size_t first, std::size_t stride, const F& f) {
  for (std::size_t i = first; i < s.head; i += stride) f(Width<1>(), i);
  for (std::size_t k = first; k < s.packs; k += stride) f(Width<width>(), s.head + k * width);
  for (std::size_t i = s.tail() + first; i < s.n; i += stride) f(Width<1>(), i);
}

/// True if all addresses and rows of c elements are multiples of 16 bytes.
template <class T, class... U>
bool rows_are_packs(std::size_t c, const T* p, const U*... others) {
  const auto aligned = [](const void* q) { return reinterpret_cast<std::uintptr_t>(q) % 16 == 0; };
  return c % pack_width<T> == 0 && aligned(p) && (aligned(others) && ...);
}

}  // namespace rz::ops
