// Each thread has a range of columns of c. The rows of a are converted to f32 once, and padded with zeros to
// a number of rows that a kernel has. A transposed b is read row by row, with the sums in registers.
// Otherwise several rows of b are added at once to sums in the first-level cache. Both add the terms of an
// element in an order that depends on k alone.

#include "tensor/kernels/linear_algebra/gemm_few_rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tensor/kernels/linear_algebra/gemm_few_rows.cpp"
#include <hwy/aligned_allocator.h>
#include <hwy/cache_control.h>
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <type_traits>

#include "comm/core/integer_math.h"
#include "tensor/kernels/vector-inl.h"

#ifndef RZ_FEW_ROWS_MEMORY
#define RZ_FEW_ROWS_MEMORY
namespace rz::kernels {
/// Rows of a, padded, and the sums of a block of columns; rows are `a_stride` and `sums_stride` apart.
struct FewRowsMemory {
  float* a;
  std::size_t a_stride;
  float* sums;
  std::size_t sums_stride;
};
}  // namespace rz::kernels
#endif

HWY_BEFORE_NAMESPACE();
namespace rz {
namespace HWY_NAMESPACE {

using kernels::FewRowsMemory;

/// Bytes between a load of b and what it prefetches: the lines that memory delivers meanwhile.
constexpr std::size_t prefetched_bytes = 4096;

/// sums[r][j … j + columns) of `rows` rows of a, from `first` on, with as many rows of b, from `b` on.
template <std::size_t rows, std::size_t columns, class T>
HWY_INLINE void multiply_rows_of_b(const FewRowsMemory& memory, std::size_t first, std::size_t j, const T* b,
                                   std::size_t b_stride, std::size_t k) {
  const Floats d;
  const std::size_t lanes = hn::Lanes(d);
  const float* const a = memory.a + first * memory.a_stride;
  FloatVector sum[rows][columns], x[columns];
  for (std::size_t r = 0; r < rows; ++r)
    for (std::size_t c = 0; c < columns; ++c) sum[r][c] = hn::Zero(d);
  const auto add = [&](std::size_t i) HWY_ATTR {
    for (std::size_t r = 0; r < rows; ++r) {
      const FloatVector y = hn::Load(d, a + r * memory.a_stride + i);
      for (std::size_t c = 0; c < columns; ++c) sum[r][c] = hn::MulAdd(x[c], y, sum[r][c]);
    }
  };
  std::size_t i = 0;
  for (; i + lanes <= k; i += lanes) {
    for (std::size_t c = 0; c < columns; ++c) {
      hwy::Prefetch(b + c * b_stride + i + prefetched_bytes / sizeof(T));
      x[c] = load(d, b + c * b_stride + i);
    }
    add(i);
  }
  if (i < k) {
    for (std::size_t c = 0; c < columns; ++c) x[c] = load_part(d, b + c * b_stride + i, k - i, 0.0f);
    add(i);
  }
  for (std::size_t r = 0; r < rows; ++r)
    for (std::size_t c = 0; c < columns; ++c)
      memory.sums[(first + r) * memory.sums_stride + j + c] = hn::GetLane(hn::SumOfLanes(d, sum[r][c]));
}

/// sums[r][0 … n) += the products of a[r][i … i + depth) with `depth` rows of b, from `b` on.
template <std::size_t rows, std::size_t depth, class T>
HWY_INLINE void add_rows_of_b(const FewRowsMemory& memory, std::size_t i, const T* b, std::size_t b_stride,
                              std::size_t n) {
  const Floats d;
  const std::size_t lanes = hn::Lanes(d);
  FloatVector x[depth];
  const auto add = [&](std::size_t j) HWY_ATTR {
    for (std::size_t r = 0; r < rows; ++r) {
      float* const to = memory.sums + r * memory.sums_stride + j;
      FloatVector sum = hn::Load(d, to);
      for (std::size_t q = 0; q < depth; ++q)
        sum = hn::MulAdd(hn::Set(d, memory.a[r * memory.a_stride + i + q]), x[q], sum);
      hn::Store(sum, d, to);
    }
  };
  std::size_t j = 0;
  for (; j + lanes <= n; j += lanes) {
    for (std::size_t q = 0; q < depth; ++q) {
      hwy::Prefetch(b + (q + depth) * b_stride + j);
      x[q] = load(d, b + q * b_stride + j);
    }
    add(j);
  }
  if (j == n) return;
  for (std::size_t q = 0; q < depth; ++q) x[q] = load_part(d, b + q * b_stride + j, n - j, 0.0f);
  add(j);
}

/// The sums of columns [begin, end), for `rows` rows of a, of which the last ones may be padding.
template <std::size_t rows, class T>
void sum_columns(const kernels::FewRowsProduct& p, const FewRowsMemory& memory, std::size_t begin,
                 std::size_t end) {
  const T* const b = static_cast<const T*>(p.b);
  const std::size_t n = end - begin;
  if (p.b_transposed) {
    // Memory is fastest row by row. More rows of a share their loads between two rows of b.
    constexpr std::size_t together = rows <= 2 ? 1 : 2, at_once = std::min<std::size_t>(rows, 4);
    const auto multiply = [&](auto columns, std::size_t j) HWY_ATTR {
      for (std::size_t r = 0; r < rows; r += at_once)
        multiply_rows_of_b<at_once, columns>(memory, r, j, b + (begin + j) * p.b_stride, p.b_stride, p.k);
    };
    std::size_t j = 0;
    for (; j + together <= n; j += together) multiply(std::integral_constant<std::size_t, together>(), j);
    for (; j < n; ++j) multiply(std::integral_constant<std::size_t, 1>(), j);
    return;
  }
  for (std::size_t r = 0; r < rows; ++r)
    std::fill_n(memory.sums + r * memory.sums_stride, memory.sums_stride, 0.0f);
  std::size_t i = 0;
  for (; i + 4 <= p.k; i += 4) add_rows_of_b<rows, 4>(memory, i, b + i * p.b_stride + begin, p.b_stride, n);
  for (; i < p.k; ++i) add_rows_of_b<rows, 1>(memory, i, b + i * p.b_stride + begin, p.b_stride, n);
}

/// Rows of a in f32; rows that a has not, and the elements up to a_stride, are 0.
void widen_few_rows(const kernels::FewRowsProduct& p, const FewRowsMemory& memory, std::size_t rows) {
  ops::dispatch_dtype(p.factors, [&](auto t) HWY_ATTR {
    using T = decltype(t);
    for (std::size_t r = 0; r < rows; ++r) {
      float* const to = memory.a + r * memory.a_stride;
      const std::size_t n = r < p.m ? p.k : 0;
      map(
          to, n, [](auto x) HWY_ATTR { return x; }, static_cast<const T*>(p.a) + r * p.a_stride);
      std::fill(to + n, to + memory.a_stride, 0.0f);
    }
  });
}

void multiply_few_rows(const kernels::FewRowsProduct& p, const FewRowsMemory& memory, std::size_t begin,
                       std::size_t end) {
  ops::dispatch_dtype(p.factors, [&](auto t) HWY_ATTR {
    using T = decltype(t);
    if (p.m == 1)
      sum_columns<1, T>(p, memory, begin, end);
    else if (p.m == 2)
      sum_columns<2, T>(p, memory, begin, end);
    else if (p.m <= 4)
      sum_columns<4, T>(p, memory, begin, end);
    else
      sum_columns<8, T>(p, memory, begin, end);
    ops::dispatch_gradient_dtype<T>(p.result, [&](auto o) HWY_ATTR {
      using C = decltype(o);
      const auto sum = [](auto x, auto y) HWY_ATTR { return hn::Add(x, y); };
      for (std::size_t r = 0; r < p.m; ++r) {
        C* const c = static_cast<C*>(p.c) + r * p.c_stride + begin;
        const float* const sums = memory.sums + r * memory.sums_stride;
        if (p.bias)
          map(c, end - begin, sum, sums, static_cast<const T*>(p.bias) + begin);
        else
          map(
              c, end - begin, [](auto x) HWY_ATTR { return x; }, sums);
      }
    });
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace rz
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace rz {

HWY_EXPORT(widen_few_rows);
HWY_EXPORT(multiply_few_rows);

namespace kernels {

namespace {

constexpr std::size_t block_columns = 1024;
constexpr std::size_t padding = 64;  // elements: at least a vector

/// Memory of a thread, kept until it ends.
class FewRowsWorkspace {
 public:
  float* get(std::size_t count) {
    if (count > count_) memory_ = hwy::AllocateAligned<float>(count_ = count);
    return memory_.get();
  }

 private:
  std::size_t count_ = 0;
  hwy::AlignedFreeUniquePtr<float[]> memory_;
};

}  // namespace

void gemm_few_rows(const FewRowsProduct& p, const Stream& stream) {
  if (p.m == 0 || p.n == 0) return;
  const std::size_t rows = p.m <= 2 ? p.m : p.m <= 4 ? 4 : max_few_rows;
  const std::size_t a_stride = round_up(p.k, padding);
  stream.parallel_for(p.n, 16, [&](std::size_t begin, std::size_t end) {
    static thread_local FewRowsWorkspace workspace;
    float* const memory = workspace.get(rows * (a_stride + block_columns));
    HWY_DYNAMIC_DISPATCH(widen_few_rows)(p, {memory, a_stride, nullptr, 0}, rows);
    for (std::size_t j = begin; j < end; j += block_columns) HWY_DYNAMIC_DISPATCH(multiply_few_rows)
    (p, {memory, a_stride, memory + rows * a_stride, block_columns}, j, std::min(end, j + block_columns));
  });
}

}  // namespace kernels
}  // namespace rz
#endif
