#pragma once
/// Reduction of several sources by the threads of a block or a grid; device code shared by several kernels.
/// Sources are reduced in their order, so that every rank gets the same bits. Processes 16 bytes at a time if
/// all addresses are aligned.

#include <cstddef>
#include <cstdint>

#include "comm/core/error.h"
#include "comm/reduce/reduce_ops.h"

namespace rz::peer {

/// Index of this thread among the threads that share a loop.
struct ThreadIndex {
  std::size_t index, count;
};

template <class T>
struct alignas(16) Word {
  static constexpr int count = 16 / static_cast<int>(sizeof(T));
  T at[count];
};

__device__ inline bool aligned(const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; }

using elementwise::MeanFactors;

template <class Op, class T>
__device__ void widen(elementwise::Accumulator<Op, T>* to, const Word<T>& word, const MeanFactors& mean) {
#pragma unroll
  for (int v = 0; v < Word<T>::count; ++v) to[v] = elementwise::widen<Op>(word.at[v], mean);
}

template <class Op, class T>
__device__ void accumulate(Op op, elementwise::Accumulator<Op, T>* sum, const Word<T>& word,
                           const MeanFactors& mean) {
#pragma unroll
  for (int v = 0; v < Word<T>::count; ++v)
    sum[v] = op.apply(sum[v], elementwise::widen<Op>(word.at[v], mean));
}

/// Word `w` of the result. Keeps four loads in flight, unless the accumulators need the registers.
template <class Op, class T>
__device__ Word<T> reduce_word(Op op, const T* const* sources, int n, std::size_t w,
                               const MeanFactors& mean) {
  const auto word = [&](int s) { return reinterpret_cast<const Word<T>*>(sources[s])[w]; };
  elementwise::Accumulator<Op, T> sum[Word<T>::count];
  widen<Op>(sum, word(0), mean);
  int s = 1;
  for (; Word<T>::count <= 8 && s + 4 <= n; s += 4) {
    const Word<T> a = word(s), b = word(s + 1), c = word(s + 2), d = word(s + 3);
    accumulate(op, sum, a, mean), accumulate(op, sum, b, mean);
    accumulate(op, sum, c, mean), accumulate(op, sum, d, mean);
  }
  for (; s < n; ++s) accumulate(op, sum, word(s), mean);
  Word<T> result;
#pragma unroll
  for (int v = 0; v < Word<T>::count; ++v) result.at[v] = elementwise::narrow<Op, T>(sum[v], mean);
  return result;
}

template <class Op, class T>
__device__ T reduce_element(Op op, const T* const* sources, int n, std::size_t i, const MeanFactors& mean) {
  auto sum = elementwise::widen<Op>(sources[0][i], mean);
  for (int s = 1; s < n; ++s) sum = op.apply(sum, elementwise::widen<Op>(sources[s][i], mean));
  return elementwise::narrow<Op, T>(sum, mean);
}

/// dst[i] = sources[0][i] op sources[1][i] op …, for all i < count; an average if `divisor` > 1. dst may be
/// one of the sources.
template <class Op, class T>
__device__ void reduce_elements(Op op, T* dst, const T* const* sources, int n, std::size_t count, int divisor,
                                ThreadIndex thread) {
  const MeanFactors mean(divisor);
  bool words = aligned(dst);
  for (int s = 0; s < n; ++s) words = words && aligned(sources[s]);
  const std::size_t whole = words ? count / Word<T>::count : 0;
  for (std::size_t w = thread.index; w < whole; w += thread.count)
    reinterpret_cast<Word<T>*>(dst)[w] = reduce_word(op, sources, n, w, mean);
  for (std::size_t i = whole * Word<T>::count + thread.index; i < count; i += thread.count)
    dst[i] = reduce_element(op, sources, n, i, mean);
}

template <class T>
__device__ void scale_elements(T* dst, const T* src, std::size_t count, double factor, ThreadIndex thread) {
  for (std::size_t i = thread.index; i < count; i += thread.count)
    dst[i] = elementwise::scale(src[i], factor);
}

/// Calls f(T{}), T being the element type.
template <class F>
void dispatch_dtype(DType t, const F& f) {
  switch (t) {
    case DType::f32:
      return f(float{});
    case DType::f64:
      return f(double{});
    case DType::f16:
      return f(f16{});
    case DType::bf16:
      return f(bf16{});
    case DType::f8e4m3:
      return f(f8e4m3{});
    case DType::f8e5m2:
      return f(f8e5m2{});
    case DType::i8:
      return f(std::int8_t{});
    case DType::u8:
      return f(std::uint8_t{});
    case DType::i32:
      return f(std::int32_t{});
    case DType::u32:
      return f(std::uint32_t{});
    case DType::i64:
      return f(std::int64_t{});
    case DType::u64:
      return f(std::uint64_t{});
  }
}

/// Calls f(op, T{}). avg and premul_sum are dispatched as sums.
template <class F>
void dispatch_op(ReduceOp::Kind kind, DType t, const F& f) {
  dispatch_dtype(t, [&](auto element) {
    switch (kind) {
      case ReduceOp::prod:
        return f(elementwise::RuntimeOp{elementwise::RuntimeOp::product}, element);
      case ReduceOp::min:
        return f(elementwise::RuntimeOp{elementwise::RuntimeOp::min}, element);
      case ReduceOp::max:
        return f(elementwise::RuntimeOp{elementwise::RuntimeOp::max}, element);
      default:
        return f(elementwise::Sum{}, element);
    }
  });
}

}  // namespace rz::peer
