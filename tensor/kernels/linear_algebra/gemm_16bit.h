#pragma once
/// Matrix products of 16-bit operands on the host, with sums in f32 and one rounding of each result. Every
/// element is summed over k in the same order wherever the work is split, so results do not depend on the
/// number of threads. They depend on the engine that the CPU selects.

#include <array>
#include <cstddef>
#include <cstdint>

#include "comm/core/types.h"
#include "comm/device/stream.h"

namespace rz::kernels {

/// A row-major matrix of bf16 or f16.
struct Matrix16 {
  const std::uint16_t* data;
  std::size_t stride;       ///< elements between rows
  bool transposed = false;  ///< stored as [columns, rows]
};

/// c[m, n] = a[m, k] · b[k, n] + bias[n], or c += a · b.
struct Product16 {
  std::size_t m, n, k;
  DType factors;  ///< dtype of a, b and bias: bf16 or f16
  Matrix16 a, b;
  void* c;
  DType result;  ///< dtype of c: that of the factors, or f32
  std::size_t c_stride;
  const void* bias = nullptr;
  bool accumulate = false;
};

void gemm_16bit(const Product16&, const Stream&);

/// One way to multiply blocks. `depth` is the extent along k. Packed blocks are 64-byte aligned.
struct GemmEngine {
  const char* name;
  /// Work is split over threads in multiples of these.
  std::size_t row_grain, column_grain;
  /// Packs a(i … i+rows-1, k … k+depth-1).
  void (*pack_a)(void* to, const Matrix16& a, std::size_t i, std::size_t rows, std::size_t k,
                 std::size_t depth);
  /// Packs b(k … k+depth-1, j … j+columns-1).
  void (*pack_b)(void* to, const Matrix16& b, std::size_t k, std::size_t depth, std::size_t j,
                 std::size_t columns);
  /// sums = a · b if `first`, otherwise sums += a · b, of packed blocks of this product. Rows and columns of
  /// `sums` up to the next multiple of 32 may be written.
  void (*multiply)(const Product16&, float* sums, std::size_t stride, const void* a, const void* b,
                   std::size_t rows, std::size_t columns, std::size_t depth, bool first);
};

/// All engines that this CPU can run for a dtype, the selected one first: tiles (AMX-BF16), vectors
/// (AVX512-BF16), or conversion to f32 and the BLAS. Intel's vectors come last, since
/// conversion is faster there (Sapphire Rapids: 110 and 147 GFLOP/s per core, tiles 1000). Tiles and vectors
/// take subnormal bf16 numbers for 0. At most three; the rest is null.
using GemmEngines = std::array<const GemmEngine*, 3>;
GemmEngines gemm_engines(DType factors);

/// The product by this engine.
void gemm_16bit(const Product16&, const GemmEngine&, const Stream&);

/// Null where the CPU, the operating system or the compiler's target lacks the instructions.
const GemmEngine* tile_engine();    ///< AMX-BF16
const GemmEngine* vector_engine();  ///< AVX512-BF16
/// Whether vectors of bf16 are faster than conversion on this CPU.
bool prefers_vectors();
const GemmEngine& converting_engine(DType factors);

}  // namespace rz::kernels
