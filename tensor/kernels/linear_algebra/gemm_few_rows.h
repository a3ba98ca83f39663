#pragma once
/// Products of few rows with a matrix on the host, as those of a token that a model generates. Each element
/// of the matrix is read once, from where it is, so that the time is that of reading it.

#include <cstddef>

#include "comm/core/types.h"
#include "comm/device/stream.h"

namespace rz::kernels {

/// Above it, packed blocks are faster.
inline constexpr std::size_t max_few_rows = 8;

/// c[m, n] = a[m, k] · b[k, n] + bias[n], with m up to max_few_rows.
struct FewRowsProduct {
  std::size_t m, n, k;
  DType factors;  ///< dtype of a, b and bias: f32, f16 or bf16
  const void* a;
  std::size_t a_stride;  ///< elements between rows
  const void* b;
  std::size_t b_stride;
  bool b_transposed;  ///< stored as [n, k]
  void* c;
  DType result;  ///< dtype of c: that of the factors, or f32
  std::size_t c_stride;
  const void* bias = nullptr;
};

/// Sums in f32, in the order of k, one rounding of each result. The bits of a row depend neither on the other
/// rows nor on the number of threads; they depend on the vectors of the CPU.
void gemm_few_rows(const FewRowsProduct&, const Stream&);

}  // namespace rz::kernels
