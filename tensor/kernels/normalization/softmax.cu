// One block per row. A single pass computes the maximum and the sum of e^(x - maximum): a thread rescales its
// sum when it finds a larger element (Milakov and Gimelshein, arXiv:1805.02867). Sums within a thread are
// short and in f32; the threads' sums are added in double.

#include "tensor/kernels/block_sum.h"
#include "tensor/kernels/device_ops.h"
#include "tensor/kernels/dtype_dispatch.h"
#include "tensor/kernels/normalization/parts_of_row.h"
#include "tensor/kernels/vector_load.h"

namespace rz::ops::device {

namespace {

constexpr std::int32_t ignored = -100;
constexpr unsigned max_threads = 512;

/// A matrix whose row blockIdx.x is here().
template <class T>
struct Matrix {
  T* data;
  std::size_t stride;
  __device__ T* here() const { return data + std::size_t{blockIdx.x} * stride; }
};
template <class T>
Matrix<T> matrix_of(const Tensor& t) {
  return {t.data<std::remove_const_t<T>>(), t.row_stride()};
}

__device__ inline float not_a_number() { return detail::float_of(0x7fc00000u); }

/// Σ e^(x - maximum) over the elements of one thread.
struct Exponentials {
  float maximum = -INFINITY, sum = 0;

  template <int k>
  __device__ void add(const float (&x)[k]) {
    float larger = maximum;
#pragma unroll
    for (int j = 0; j < k; ++j) larger = fmaxf(larger, x[j]);
    const float shift = larger == -INFINITY ? 0 : larger;  // every e^(-∞) is 0
    float added = 0;
#pragma unroll
    for (int j = 0; j < k; ++j) added += expf(x[j] - shift);
    sum = sum * expf(maximum - shift) + added;
    maximum = larger;
  }
};

struct RowSum {
  float maximum;
  double sum;  ///< NaN if the row contains NaN or only -∞
};

/// Every thread of the block gets the result.
template <class T>
__device__ inline RowSum sum_of_exponentials(const T* row, std::size_t n) {
  Exponentials own;
  each_pack(Split<pack_width<T>>(n, row), threadIdx.x, blockDim.x, [&](auto width, std::size_t i) {
    float x[decltype(width)::value];
    load(x, row + i);
    own.add(x);
  });
  const float maximum = block_max(own.maximum);
  const double part = own.sum == 0 ? 0 : static_cast<double>(own.sum * expf(own.maximum - maximum));
  const double sum = block_sum(part);
  return {maximum, maximum == -INFINITY ? static_cast<double>(not_a_number()) : sum};
}

template <class T>
__global__ void __launch_bounds__(max_threads)
    softmax_rows(Matrix<T> outs, Matrix<const T> ins, std::size_t n) {
  T* const out = outs.here();
  const T* const in = ins.here();
  const RowSum row = sum_of_exponentials(in, n);
  const auto factor = static_cast<float>(1 / row.sum);
  const auto split = Split<pack_width<T>>(n, in).with(out);
  each_pack(split, threadIdx.x, blockDim.x, [&](auto width, std::size_t i) {
    float x[decltype(width)::value];
    load(x, in + i);
    for (float& v : x) v = expf(v - row.maximum) * factor;
    store(out + i, x);
  });
}

template <class T>
__global__ void __launch_bounds__(max_threads)
    softmax_rows_backward(Matrix<T> d_ins, Matrix<const T> d_outs, Matrix<const T> outs, std::size_t n,
                          bool accumulate) {
  T* const d_in = d_ins.here();
  const T *const d_out = d_outs.here(), *const out = outs.here();
  const auto split = Split<pack_width<T>>(n, d_out).with(out).with(d_in);
  double part = 0;
  each_pack(split, threadIdx.x, blockDim.x, [&](auto width, std::size_t i) {
    constexpr int k = decltype(width)::value;
    float dy[k], y[k], sum = 0;
    load(dy, d_out + i), load(y, out + i);
#pragma unroll
    for (int j = 0; j < k; ++j) sum += dy[j] * y[j];
    part += static_cast<double>(sum);
  });
  const auto mean = static_cast<float>(block_sum(part));
  each_pack(split, threadIdx.x, blockDim.x, [&](auto width, std::size_t i) {
    constexpr int k = decltype(width)::value;
    float dy[k], y[k], d[k] = {};
    load(dy, d_out + i), load(y, out + i);
    if (accumulate) load(d, d_in + i);
#pragma unroll
    for (int j = 0; j < k; ++j) d[j] += y[j] * (dy[j] - mean);
    store(d_in + i, d);
  });
}

/// The largest element is subtracted first, so that large elements keep their differences.
template <class T>
__global__ void __launch_bounds__(max_threads)
    log_softmax_rows(Matrix<T> outs, Matrix<const T> ins, std::size_t n) {
  T* const out = outs.here();
  const T* const in = ins.here();
  const RowSum row = sum_of_exponentials(in, n);
  const auto log_sum = static_cast<float>(log(row.sum));
  const auto split = Split<pack_width<T>>(n, in).with(out);
  each_pack(split, threadIdx.x, blockDim.x, [&](auto width, std::size_t i) {
    float x[decltype(width)::value];
    load(x, in + i);
    for (float& v : x) v = v - row.maximum - log_sum;
    store(out + i, x);
  });
}

/// d_in = d_out - e^out · Σ d_out
template <class T>
__global__ void __launch_bounds__(max_threads)
    log_softmax_rows_backward(Matrix<T> d_ins, Matrix<const T> d_outs, Matrix<const T> outs, std::size_t n,
                              bool accumulate) {
  T* const d_in = d_ins.here();
  const T *const d_out = d_outs.here(), *const out = outs.here();
  const auto split = Split<pack_width<T>>(n, d_out).with(out).with(d_in);
  double part = 0;
  each_pack(split, threadIdx.x, blockDim.x, [&](auto width, std::size_t i) {
    float dy[decltype(width)::value];
    load(dy, d_out + i);
    for (const float v : dy) part += static_cast<double>(v);
  });
  const auto total = static_cast<float>(block_sum(part));
  each_pack(split, threadIdx.x, blockDim.x, [&](auto width, std::size_t i) {
    constexpr int k = decltype(width)::value;
    float dy[k], y[k], d[k] = {};
    load(dy, d_out + i), load(y, out + i);
    if (accumulate) load(d, d_in + i);
#pragma unroll
    for (int j = 0; j < k; ++j) d[j] += fmaf(-expf(y[j]), total, dy[j]);
    store(d_in + i, d);
  });
}

template <class T>
__global__ void __launch_bounds__(max_threads)
    cross_entropy_rows(float* losses, float* log_sum, Matrix<const T> logits, const std::int32_t* targets,
                       std::size_t n) {
  const T* const row = logits.here();
  const RowSum total = sum_of_exponentials(row, n);
  if (threadIdx.x != 0) return;
  const double log_total = static_cast<double>(total.maximum) + log(total.sum);
  const std::int32_t target = targets[blockIdx.x];
  const bool inside = target >= 0 && static_cast<std::size_t>(target) < n;
  const float here = inside ? to_f32(row[target]) : not_a_number();
  log_sum[blockIdx.x] = static_cast<float>(log_total);
  losses[blockIdx.x] = target == ignored ? 0 : static_cast<float>(log_total - static_cast<double>(here));
}

template <class T>
__global__ void __launch_bounds__(max_threads)
    cross_entropy_rows_of_part(float* statistics, Matrix<const T> logits, const std::int32_t* targets,
                               std::size_t n) {
  const T* const row = logits.here();
  const RowSum total = sum_of_exponentials(row, n);
  if (threadIdx.x != 0) return;
  const std::int32_t target = targets[blockIdx.x];
  const bool inside = target >= 0 && static_cast<std::size_t>(target) < n;
  float* const out = statistics + 2 * std::size_t{blockIdx.x};
  out[0] = static_cast<float>(static_cast<double>(total.maximum) + log(total.sum));
  out[1] = inside ? to_f32(row[target]) : target == elsewhere || target == ignored ? 0 : not_a_number();
}

__global__ void cross_entropy_rows_of_parts(float* losses, float* log_sum, const float* statistics,
                                            const std::int32_t* targets, std::size_t n, std::size_t parts) {
  for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n;
       i += std::size_t{gridDim.x} * blockDim.x) {
    const PartsOfRow row = parts_of_row(statistics, i, n, parts);
    log_sum[i] = static_cast<float>(row.log_sum);
    losses[i] = targets[i] == ignored ? 0 : static_cast<float>(row.log_sum - row.target);
  }
}

/// One block: a pass over two numbers per row.
__global__ void sum_of_losses(float* loss, double* sums, const float* losses, const std::int32_t* targets,
                              std::size_t rows) {
  double sum = 0, count = 0;
  for (std::size_t i = threadIdx.x; i < rows; i += blockDim.x) {
    sum += static_cast<double>(losses[i]);
    count += targets[i] != ignored;
  }
  sum = block_sum(sum), count = block_sum(count);
  if (threadIdx.x != 0) return;
  sums[0] = sum, sums[1] = count;
  *loss = static_cast<float>(sum);
}

template <class T>
__global__ void __launch_bounds__(max_threads)
    cross_entropy_rows_backward(Matrix<T> d_rows, Matrix<const T> rows, const float* log_sum,
                                const std::int32_t* targets, const float* d_loss, std::size_t n) {
  T* const d_logits = d_rows.here();
  const T* const logits = rows.here();
  const std::int32_t target = targets[blockIdx.x];
  const bool inside = target >= 0 && static_cast<std::size_t>(target) < n;
  const bool valid = inside || target == elsewhere;
  const float factor = valid ? *d_loss : not_a_number(), shift = log_sum[blockIdx.x];
  const std::size_t chosen = inside ? static_cast<std::size_t>(target) : ~std::size_t{0};
  each_pack(Split<pack_width<T>>(n, logits).with(d_logits), threadIdx.x, blockDim.x,
            [&](auto width, std::size_t i) {
              constexpr int k = decltype(width)::value;
              float x[k] = {};
              if (target != ignored) {
                load(x, logits + i);
#pragma unroll
                for (int j = 0; j < k; ++j)
                  x[j] =
                      expf(x[j] - shift) * factor - (i + static_cast<std::size_t>(j) == chosen ? factor : 0);
              }
              store(d_logits + i, x);
            });
}

std::size_t last(const Tensor& t) { return t.shape().dims() ? t.shape()[-1] : 1; }

/// One block per row of `t`.
cuda::Grid grid_of_rows(const Tensor& t) {
  const std::size_t n = last(t), width = 16 / size_of(t.dtype());
  return {{static_cast<unsigned>(n ? t.count() / n : 0)},
          {threads_for_row((n + width - 1) / width, max_threads)}};
}

}  // namespace

void softmax(const Tensor& out, const Tensor& in, const Stream& stream) {
  dispatch_dtype(in.dtype(), [&](auto t) {
    using T = decltype(t);
    cuda::launch("softmax", softmax_rows<T>, grid_of_rows(in), stream, matrix_of<T>(out),
                 matrix_of<const T>(in), last(in));
  });
}

void softmax_backward(const Tensor& d_in, const Tensor& d_out, const Tensor& out, Into into,
                      const Stream& stream) {
  dispatch_dtype(out.dtype(), [&](auto t) {
    using T = decltype(t);
    cuda::launch("softmax_backward", softmax_rows_backward<T>, grid_of_rows(out), stream, matrix_of<T>(d_in),
                 matrix_of<const T>(d_out), matrix_of<const T>(out), last(out), into == Into::accumulate);
  });
}

void log_softmax(const Tensor& out, const Tensor& in, const Stream& stream) {
  dispatch_dtype(in.dtype(), [&](auto t) {
    using T = decltype(t);
    cuda::launch("log_softmax", log_softmax_rows<T>, grid_of_rows(in), stream, matrix_of<T>(out),
                 matrix_of<const T>(in), last(in));
  });
}

void log_softmax_backward(const Tensor& d_in, const Tensor& d_out, const Tensor& out, Into into,
                          const Stream& stream) {
  dispatch_dtype(out.dtype(), [&](auto t) {
    using T = decltype(t);
    cuda::launch("log_softmax_backward", log_softmax_rows_backward<T>, grid_of_rows(out), stream,
                 matrix_of<T>(d_in), matrix_of<const T>(d_out), matrix_of<const T>(out), last(out),
                 into == Into::accumulate);
  });
}

void cross_entropy(const Tensor& loss, const Tensor& sums, const Tensor& losses, const Tensor& log_sum,
                   const Tensor& logits, const Tensor& targets, const Stream& stream) {
  const auto* const target = targets.data<std::int32_t>();
  dispatch_dtype(logits.dtype(), [&](auto t) {
    using T = decltype(t);
    cuda::launch("cross_entropy", cross_entropy_rows<T>, grid_of_rows(logits), stream, losses.data<float>(),
                 log_sum.data<float>(), matrix_of<const T>(logits), target, last(logits));
  });
  cuda::launch("cross_entropy", sum_of_losses, {{1}, {threads_for_row(losses.count(), 1024)}}, stream,
               loss.data<float>(), sums.data<double>(), losses.data<float>(), target, losses.count());
}

void cross_entropy_part(const Tensor& statistics, const Tensor& logits, const Tensor& targets,
                        const Stream& stream) {
  dispatch_dtype(logits.dtype(), [&](auto t) {
    using T = decltype(t);
    cuda::launch("cross_entropy_part", cross_entropy_rows_of_part<T>, grid_of_rows(logits), stream,
                 statistics.data<float>(), matrix_of<const T>(logits), targets.data<std::int32_t>(),
                 last(logits));
  });
}

void cross_entropy_of_parts(const Tensor& loss, const Tensor& sums, const Tensor& losses,
                            const Tensor& log_sum, const Tensor& statistics, const Tensor& targets,
                            const Stream& stream) {
  const std::size_t n = losses.count();
  const auto* const target = targets.data<std::int32_t>();
  cuda::launch("cross_entropy_of_parts", cross_entropy_rows_of_parts, cuda::grid_for(n), stream,
               losses.data<float>(), log_sum.data<float>(), statistics.data<float>(), target, n,
               n ? statistics.count() / (2 * n) : 0);
  cuda::launch("cross_entropy_of_parts", sum_of_losses, {{1}, {threads_for_row(n, 1024)}}, stream,
               loss.data<float>(), sums.data<double>(), losses.data<float>(), target, n);
}

void cross_entropy_backward(const Tensor& d_logits, const Tensor& logits, const Tensor& log_sum,
                            const Tensor& targets, const Tensor& d_loss, const Stream& stream) {
  dispatch_dtype(logits.dtype(), [&](auto t) {
    using T = decltype(t);
    cuda::launch("cross_entropy_backward", cross_entropy_rows_backward<T>, grid_of_rows(logits), stream,
                 matrix_of<T>(d_logits), matrix_of<const T>(logits), log_sum.data<float>(),
                 targets.data<std::int32_t>(), d_loss.data<float>(), last(logits));
  });
}

}  // namespace rz::ops::device
