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

/// Products of equal sizes, from elements batch · step on.
struct Batch {
  std::size_t count = 1;
  std::size_t a_step = 0, b_step = 0, c_step = 0;  ///< 0: the same factor for all

  /// Whether threads share the products, each of which is computed by one of them: where they are many, or
  /// too small to be split. It depends on the sizes only.
  bool is_shared(std::size_t m, std::size_t n, std::size_t k) const {
    return count > 1 && (count >= 32 || m * n * k <= std::size_t{1} << 20);
  }
};
/// c = a · b + beta · c for each product; the bits are as of one.
void gemm(float* c, std::size_t c_stride, std::size_t m, std::size_t n, std::size_t k, Matrix a, Matrix b,
          float beta, const Batch&, const Stream&);

}  // namespace rz::kernels
