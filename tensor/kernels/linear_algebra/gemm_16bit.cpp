// C is split into ranges of rows or columns, one per thread. A range is computed in blocks whose sums stay in
// f32 while k advances in steps: for each step a block of b is packed once and used by all rows of the block
// of c.

#include "tensor/kernels/linear_algebra/gemm_16bit.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tensor/kernels/linear_algebra/gemm_16bit.cpp"
#include <hwy/aligned_allocator.h>
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>

#include "comm/core/lazy.h"
#include "tensor/kernels/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace rz {
namespace HWY_NAMESPACE {

template <class C, class T>
HWY_INLINE void store_row(C* c, const float* sums, const T* bias, std::size_t n, bool accumulate) {
  const auto add = [](auto x, auto y) HWY_ATTR { return hn::Add(x, y); };
  if (bias)
    map(c, n, add, sums, bias);
  else
    map_into(
        accumulate, c, n, [](auto x) HWY_ATTR { return x; }, sums);
}

/// Rows [i, i + rows) and columns [j, j + columns) of the result.
void store_block(const kernels::Product16& p, const float* sums, std::size_t sums_stride, std::size_t i,
                 std::size_t rows, std::size_t j, std::size_t columns) {
  ops::dispatch_dtype(p.factors, [&](auto t) HWY_ATTR {
    using T = decltype(t);
    ops::dispatch_gradient_dtype<T>(p.result, [&](auto o) HWY_ATTR {
      using C = decltype(o);
      const T* const bias = p.bias ? static_cast<const T*>(p.bias) + j : nullptr;
      for (std::size_t r = 0; r < rows; ++r) {
        C* const c = static_cast<C*>(p.c) + (i + r) * p.c_stride + j;
        store_row(c, sums + r * sums_stride, bias, columns, p.accumulate);
      }
    });
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace rz
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace rz {

HWY_EXPORT(store_block);

namespace kernels {

namespace {

constexpr std::size_t block_rows = 1024, block_columns = 512, block_depth = 512;
constexpr std::size_t packed_rows = 128;  // of a, packed at a time
// Not a power of two, so that the rows of a tile fall into different cache sets.
constexpr std::size_t sums_stride = block_columns + 16;

/// Memory of a thread, kept until it ends. Packed elements take up to 4 bytes.
struct Workspace {
  hwy::AlignedFreeUniquePtr<float[]> a = hwy::AllocateAligned<float>(packed_rows * block_depth);
  hwy::AlignedFreeUniquePtr<float[]> b = hwy::AllocateAligned<float>(block_columns * block_depth);
  hwy::AlignedFreeUniquePtr<float[]> sums = hwy::AllocateAligned<float>(block_rows * sums_stride);
};

struct Block {
  std::size_t i, rows, j, columns;
};

void multiply_block(const Product16& p, const GemmEngine& engine, const Block& block, Workspace& memory) {
  float* const sums = memory.sums.get();
  for (std::size_t k = 0; k < p.k; k += block_depth) {
    const std::size_t depth = std::min(block_depth, p.k - k);
    engine.pack_b(memory.b.get(), p.b, k, depth, block.j, block.columns);
    for (std::size_t r = 0; r < block.rows; r += packed_rows) {
      const std::size_t rows = std::min(packed_rows, block.rows - r);
      engine.pack_a(memory.a.get(), p.a, block.i + r, rows, k, depth);
      engine.multiply(p, sums + r * sums_stride, sums_stride, memory.a.get(), memory.b.get(), rows,
                      block.columns, depth, k == 0);
    }
  }
  if (p.k == 0) std::fill_n(sums, block.rows * sums_stride, 0.0f);
  HWY_DYNAMIC_DISPATCH(store_block)
  (p, sums, sums_stride, block.i, block.rows, block.j, block.columns);
}

void multiply_range(const Product16& p, const GemmEngine& engine, std::size_t first_row, std::size_t past_row,
                    std::size_t first_column, std::size_t past_column) {
  static thread_local Workspace memory;
  for (std::size_t i = first_row; i < past_row; i += block_rows)
    for (std::size_t j = first_column; j < past_column; j += block_columns)
      multiply_block(p, engine,
                     {i, std::min(block_rows, past_row - i), j, std::min(block_columns, past_column - j)},
                     memory);
}

}  // namespace

// Splits the side with more pieces, since every thread packs the operand that is not split.
void gemm_16bit(const Product16& p, const GemmEngine& engine, const Stream& stream) {
  if (p.m == 0 || p.n == 0) return;
  if (p.n / engine.column_grain > p.m / engine.row_grain)
    stream.parallel_for(p.n, engine.column_grain, [&](std::size_t begin, std::size_t end) {
      multiply_range(p, engine, 0, p.m, begin, end);
    });
  else
    stream.parallel_for(p.m, engine.row_grain, [&](std::size_t begin, std::size_t end) {
      multiply_range(p, engine, begin, end, 0, p.n);
    });
}

void gemm_16bit(const Product16& p, const Stream& stream) {
  static constinit Lazy<const GemmEngine*> bf16, f16;
  auto& fastest = p.factors == DType::bf16 ? bf16 : f16;
  gemm_16bit(p, *fastest.get([&] { return gemm_engines(p.factors)[0]; }), stream);
}

GemmEngines gemm_engines(DType factors) {
  GemmEngines engines{};
  int count = 0;
  const auto add = [&](const GemmEngine* e) {
    if (e) engines[count++] = e;
  };
  const bool bf16 = factors == DType::bf16;
  if (bf16) add(tile_engine());
  if (bf16 && prefers_vectors()) add(vector_engine());
  add(&converting_engine(factors));
  if (bf16 && !prefers_vectors()) add(vector_engine());
  return engines;
}

}  // namespace kernels
}  // namespace rz
#endif
