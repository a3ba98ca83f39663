#include "tensor/kernels/linear_algebra/gemm.h"

#include <cblas.h>

#include <algorithm>
#include <cstdint>
#include <mutex>

#include "comm/core/error.h"
#include "comm/core/integer_math.h"
#include "comm/os/process.h"

namespace rz::kernels {

namespace {

/// Limits the BLAS to one thread per call while at least one instance lives: the stream's team provides the
/// threads, and a second pool would compete for the cores. OpenBLAS's setting is process-wide
/// (openblas_set_num_threads_local changes the same one). So the first instance sets it, and the last
/// restores the program's value unless the program has changed it meanwhile. A child of fork() does not have
/// the threads whose instances lived then.
class OneBlasThread {
 public:
  OneBlasThread() {
    const std::lock_guard lock(mutex);
    if (generation != fork_generation() && alive > 0) alive = 1, end();
    generation = fork_generation();
    if (alive++ > 0) return;
    before = openblas_get_num_threads();
    if (before != 1) openblas_set_num_threads(1);
  }
  ~OneBlasThread() {
    const std::lock_guard lock(mutex);
    end();
  }
  OneBlasThread(const OneBlasThread&) = delete;
  OneBlasThread& operator=(const OneBlasThread&) = delete;

 private:
  static void end() {
    if (--alive == 0 && before != 1 && openblas_get_num_threads() == 1) openblas_set_num_threads(before);
  }

  static constinit inline ProcessMutex mutex;
  static inline int alive = 0, before = 1;
  static inline std::uint64_t generation = 0;
};

CBLAS_TRANSPOSE form(const Matrix& m) { return m.transposed ? CblasTrans : CblasNoTrans; }

Matrix rows_from(Matrix m, std::size_t i) {
  m.data += m.transposed ? i : i * m.stride;
  return m;
}
Matrix columns_from(Matrix m, std::size_t j) {
  m.data += m.transposed ? j * m.stride : j;
  return m;
}

/// One product on the calling thread. Requires a OneBlasThread. The BLAS refuses rows that are 0 apart, as
/// those of a factor without columns.
void multiply(float* c, std::size_t c_stride, std::size_t m, std::size_t n, std::size_t k, float alpha,
              Matrix a, Matrix b, float beta) {
  const auto apart = [](std::size_t stride) { return std::max<blasint>(1, static_cast<blasint>(stride)); };
  cblas_sgemm(CblasRowMajor, form(a), form(b), static_cast<blasint>(m), static_cast<blasint>(n),
              static_cast<blasint>(k), alpha, a.data, apart(a.stride), b.data, apart(b.stride), beta, c,
              apart(c_stride));
}

}  // namespace

void gemm(float* c, std::size_t c_stride, std::size_t m, std::size_t n, std::size_t k, float alpha, Matrix a,
          Matrix b, float beta) {
  const OneBlasThread one;
  multiply(c, c_stride, m, n, k, alpha, a, b, beta);
}

namespace {

/// Calls f(begin, end) for ranges of [0, n). A BLAS rounds an element by its place in the call: OpenBLAS's
/// Haswell kernels at the edges, others in small products. So ranges that must not depend on the number of
/// threads are parts of fixed extents, each a call of its own.
template <class F>
void split(std::size_t n, const Stream& stream, const F& f) {
  constexpr std::size_t grain = 16;  // whole micro-kernels of the BLAS
  if (stream.reproducible() == Stream::Reproducible::run_to_run) return stream.parallel_for(n, grain, f);
  // Every part packs the operand that is not split. So parts are large, but a small product has several too.
  const std::size_t parts =
      std::max({std::size_t{1}, std::min<std::size_t>(n / 64, 4), std::min<std::size_t>(n / 192, 16)});
  const std::size_t extent = std::max(grain, round_up(ceil_div(n, parts), grain));
  stream.parallel_for(ceil_div(n, extent), 1, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) f(i * extent, std::min(n, (i + 1) * extent));
  });
}

}  // namespace

// Splits the longer side of c, since every thread packs the operand that is not split.
void gemm(float* c, std::size_t c_stride, std::size_t m, std::size_t n, std::size_t k, float alpha, Matrix a,
          Matrix b, float beta, const Stream& stream) {
  const OneBlasThread one;
  if (n > m)
    split(n, stream, [&](std::size_t begin, std::size_t end) {
      multiply(c + begin, c_stride, m, end - begin, k, alpha, a, columns_from(b, begin), beta);
    });
  else
    split(m, stream, [&](std::size_t begin, std::size_t end) {
      multiply(c + begin * c_stride, c_stride, end - begin, n, k, alpha, rows_from(a, begin), b, beta);
    });
}

void gemm(float* c, std::size_t c_stride, std::size_t m, std::size_t n, std::size_t k, Matrix a, Matrix b,
          float beta, const Batch& batch, const Stream& stream) {
  const auto at = [](Matrix all, std::size_t elements) { return all.data += elements, all; };
  const auto each = [&](std::size_t i, const auto& product) {
    product(c + i * batch.c_step, at(a, i * batch.a_step), at(b, i * batch.b_step));
  };
  if (!batch.is_shared(m, n, k)) {
    for (std::size_t i = 0; i < batch.count; ++i)
      each(i, [&](float* to, const Matrix& x, const Matrix& y) {
        gemm(to, c_stride, m, n, k, 1, x, y, beta, stream);
      });
    return;
  }
  const OneBlasThread one;
  stream.parallel_for(batch.count, 1, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i)
      each(i, [&](float* to, const Matrix& x, const Matrix& y) {
        multiply(to, c_stride, m, n, k, 1, x, y, beta);
      });
  });
}

}  // namespace rz::kernels
