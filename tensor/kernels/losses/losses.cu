// One block per row; one block for the sum over rows.

#include "tensor/kernels/block_sum.h"
#include "tensor/kernels/device_ops.h"
#include "tensor/kernels/dtype_dispatch.h"
#include "tensor/kernels/losses/row_losses.h"
#include "tensor/kernels/map_elements.h"

namespace rz::ops::device {

namespace {

using losses::Matrix;
constexpr unsigned max_threads = 512;

struct Block {
  __device__ std::size_t first() const { return threadIdx.x; }
  __device__ std::size_t step() const { return blockDim.x; }
  __device__ double sum(double x) const { return block_sum(x); }
  __device__ float max(float x) const { return block_max(x); }
};

template <class T>
Matrix<T> matrix_of(const Tensor& t) {
  return {t.data<std::remove_const_t<T>>(), t.row_stride()};
}

std::size_t columns_of(const Tensor& t) { return t.shape().dims() ? t.shape()[-1] : 1; }

cuda::Grid grid_of_rows(const Tensor& t) {
  const std::size_t n = columns_of(t);
  return {{static_cast<unsigned>(n ? t.count() / n : 0)}, {threads_for_row(n, max_threads)}};
}

template <class F>
void dispatch_both(const Tensor& logits, const Tensor& targets, const F& f) {
  dispatch_dtype(logits.dtype(), [&](auto x) {
    if (targets.dtype() == DType::f32)
      f(x, float{});
    else
      f(x, x);
  });
}

template <class X, class Y>
__global__ void __launch_bounds__(max_threads) soft_rows(float* each, float* statistics, Matrix<const X> x,
                                                         Matrix<const Y> y, std::size_t n, SoftLoss how) {
  const std::size_t r = blockIdx.x;
  losses::SoftRow row{};
  const double here = losses::soft_row(Block(), x.row(r), y.row(r), n, how, row);
  if (threadIdx.x != 0) return;
  each[r] = static_cast<float>(here);
  statistics[2 * r] = static_cast<float>(row.logits);
  statistics[2 * r + 1] = static_cast<float>(row.targets);
}

template <class X, class Y>
__global__ void __launch_bounds__(max_threads)
    soft_rows_backward(Matrix<X> d, Matrix<const X> x, Matrix<const Y> y, const float* statistics,
                       const float* d_loss, std::size_t n, SoftLoss how) {
  const std::size_t r = blockIdx.x;
  const losses::SoftRow row{static_cast<double>(statistics[2 * r]),
                            static_cast<double>(statistics[2 * r + 1])};
  losses::soft_row_backward(Block(), d.row(r), x.row(r), y.row(r), n, how, row, *d_loss);
}

template <class T>
__global__ void __launch_bounds__(max_threads)
    label_rows(float* each, float* log_sum, Matrix<const T> x, const std::int32_t* targets, std::size_t n,
               LabelLoss how) {
  const std::size_t r = blockIdx.x;
  double total = 0;
  const double here = losses::label_row(Block(), x.row(r), n, targets[r], how, total);
  if (threadIdx.x != 0) return;
  each[r] = static_cast<float>(here);
  log_sum[r] = static_cast<float>(total);
}

template <class T>
__global__ void __launch_bounds__(max_threads)
    label_rows_backward(Matrix<T> d, Matrix<const T> x, const float* log_sum, const std::int32_t* targets,
                        const float* d_loss, std::size_t n, LabelLoss how) {
  const std::size_t r = blockIdx.x;
  losses::label_row_backward(Block(), d.row(r), x.row(r), n, targets[r], how, log_sum[r], *d_loss);
}

/// Rows whose target is `ignored` are no terms; without targets every row is one.
__global__ void add_rows(float* loss, double* sums, const float* each, const std::int32_t* targets,
                         std::int32_t ignored, std::size_t rows) {
  double sum = 0, count = 0;
  for (std::size_t i = threadIdx.x; i < rows; i += blockDim.x) {
    sum += static_cast<double>(each[i]);
    count += !targets || targets[i] != ignored;
  }
  sum = block_sum(sum), count = block_sum(count);
  if (threadIdx.x != 0) return;
  sums[0] = sum, sums[1] = count;
  if (loss) *loss = static_cast<float>(sum);
}

template <class T>
__global__ void __launch_bounds__(max_threads)
    right_rows(float* right, Matrix<const T> x, const std::int32_t* targets, std::int32_t ignored,
               std::size_t n) {
  const std::size_t r = blockIdx.x;
  const bool is_right = targets[r] != ignored && losses::is_largest(Block(), x.row(r), n, targets[r]);
  if (threadIdx.x == 0) right[r] = is_right ? 1 : 0;
}

/// One block suffices: these losses are used by small networks.
template <class T>
__global__ void sum_elements(float* loss, double* sums, const T* x, const T* y, std::size_t n,
                             ElementLoss how) {
  double sum = 0;
  for (std::size_t i = threadIdx.x; i < n; i += blockDim.x)
    sum += losses::element_of(how, static_cast<double>(to_f32(x[i])), static_cast<double>(to_f32(y[i])));
  sum = block_sum(sum);
  if (threadIdx.x != 0) return;
  sums[0] = sum, sums[1] = static_cast<double>(n);
  *loss = static_cast<float>(sum);
}

struct ElementGradient : Function<2> {
  const float* d_loss;
  ElementLoss how;
  __device__ float operator()(const float* x) const {
    return losses::element_gradient(how, x[0], x[1]) * *d_loss;
  }
};

void sum_rows(const Tensor& loss, const Tensor& sums, const Tensor& each, const std::int32_t* targets,
              std::int32_t ignored, const Stream& stream) {
  cuda::launch("sum_of_losses", add_rows, {{1}, {threads_for_row(each.count(), 1024)}}, stream,
               loss.defined() ? loss.data<float>() : nullptr, sums.data<double>(), each.data<float>(),
               targets, ignored, each.count());
}

}  // namespace

void soft_loss(const Tensor& loss, const Tensor& sums, const Tensor& each, const Tensor& statistics,
               const Tensor& logits, const Tensor& targets, const SoftLoss& how, const Stream& stream) {
  dispatch_both(logits, targets, [&](auto x, auto y) {
    using X = decltype(x);
    using Y = decltype(y);
    cuda::launch("soft_loss", soft_rows<X, Y>, grid_of_rows(logits), stream, each.data<float>(),
                 statistics.data<float>(), matrix_of<const X>(logits), matrix_of<const Y>(targets),
                 columns_of(logits), how);
  });
  sum_rows(loss, sums, each, nullptr, 0, stream);
}

void soft_loss_backward(const Tensor& d_logits, const Tensor& logits, const Tensor& targets,
                        const Tensor& statistics, const Tensor& d_loss, const SoftLoss& how,
                        const Stream& stream) {
  dispatch_both(logits, targets, [&](auto x, auto y) {
    using X = decltype(x);
    using Y = decltype(y);
    cuda::launch("soft_loss_backward", soft_rows_backward<X, Y>, grid_of_rows(logits), stream,
                 matrix_of<X>(d_logits), matrix_of<const X>(logits), matrix_of<const Y>(targets),
                 statistics.data<float>(), d_loss.data<float>(), columns_of(logits), how);
  });
}

void label_loss(const Tensor& loss, const Tensor& sums, const Tensor& each, const Tensor& log_sum,
                const Tensor& logits, const Tensor& targets, const LabelLoss& how, const Stream& stream) {
  const std::int32_t* const t = targets.data<std::int32_t>();
  dispatch_dtype(logits.dtype(), [&](auto type) {
    using T = decltype(type);
    cuda::launch("label_loss", label_rows<T>, grid_of_rows(logits), stream, each.data<float>(),
                 log_sum.data<float>(), matrix_of<const T>(logits), t, columns_of(logits), how);
  });
  sum_rows(loss, sums, each, t, how.ignore_index, stream);
}

void label_loss_backward(const Tensor& d_logits, const Tensor& logits, const Tensor& log_sum,
                         const Tensor& targets, const Tensor& d_loss, const LabelLoss& how,
                         const Stream& stream) {
  dispatch_dtype(logits.dtype(), [&](auto type) {
    using T = decltype(type);
    cuda::launch("label_loss_backward", label_rows_backward<T>, grid_of_rows(logits), stream,
                 matrix_of<T>(d_logits), matrix_of<const T>(logits), log_sum.data<float>(),
                 targets.data<std::int32_t>(), d_loss.data<float>(), columns_of(logits), how);
  });
}

void accuracy(const Tensor& counts, const Tensor& logits, const Tensor& targets, std::int32_t ignore_index,
              const Stream& stream) {
  const std::size_t n = columns_of(logits), rows = n ? logits.count() / n : 0;
  auto* const right = static_cast<float*>(stream.workspace(rows * sizeof(float)));
  const std::int32_t* const t = targets.data<std::int32_t>();
  dispatch_dtype(logits.dtype(), [&](auto type) {
    using T = decltype(type);
    cuda::launch("accuracy", right_rows<T>, grid_of_rows(logits), stream, right, matrix_of<const T>(logits),
                 t, ignore_index, n);
  });
  sum_rows({}, counts, Tensor::borrow(right, {rows}, DType::f32, logits.device()), t, ignore_index, stream);
}

void element_loss(const Tensor& loss, const Tensor& sums, const Tensor& x, const Tensor& y, ElementLoss how,
                  const Stream& stream) {
  dispatch_dtype(x.dtype(), [&](auto type) {
    using T = decltype(type);
    cuda::launch("element_loss", sum_elements<T>, {{1}, {threads_for_row(x.count(), 1024)}}, stream,
                 loss.data<float>(), sums.data<double>(), x.data<T>(), y.data<T>(), x.count(), how);
  });
}

void element_loss_backward(const Tensor& d_x, const Tensor& d_loss, const Tensor& x, const Tensor& y,
                           ElementLoss how, Into into, const Stream& stream) {
  const ElementGradient f{{}, d_loss.data<float>(), how};
  map_into("element_loss_backward", f, into == Into::accumulate, stream, d_x, x, y);
}

}  // namespace rz::ops::device
