#pragma once
/// Matrix products in f32 on row-major memory. The stream provides all threads: while a product runs, the
/// BLAS is set to one thread per call, and afterwards to the program's own number again
/// (docs/decisions/0002-blas.md).

#include <cstddef>

#include "comm/device/stream.h"

namespace rz::kernels {

struct Matrix {
  const float* data;
  std::size_t stride;  ///< elements between rows
  bool transposed = false;
};

/// c[m, n] = alpha · a[m, k] · b[k, n] + beta · c, on the calling thread. c is not read if beta is 0.
void gemm(float* c, std::size_t c_stride, std::size_t m, std::size_t n, std::size_t k, float alpha, Matrix a,
          Matrix b, float beta);

/// The same product with blocks of rows or columns of c split over the stream's threads. Its bits depend on
/// the sizes, and on stream.threads() unless the stream is reproducible for any number of them.
void gemm(float* c, std::size_t c_stride, std::size_t m, std::size_t n, std::size_t k, float alpha, Matrix a,
          Matrix b, float beta, const Stream&);

}  // namespace rz::kernels
