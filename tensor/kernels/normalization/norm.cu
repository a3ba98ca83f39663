// Layer norm, and RMS norm: the same with a mean of 0, without bias. One warp per row. The row is read once
// and stays in registers while its statistics are computed, unless it is long or rows are not 16-byte
// aligned. Sums over rows (the gradients of weight and bias) have an order that depends on the shape only: a
// block sums a group of columns over a slice of the rows, and a second kernel sums the slices.

#include <algorithm>

#include "tensor/kernels/block_sum.h"
#include "tensor/kernels/device_ops.h"
#include "tensor/kernels/dtype_dispatch.h"
#include "tensor/kernels/vector_load.h"

namespace rz::ops::device {

namespace {

constexpr unsigned row_threads = 256;
/// Blocks per multiprocessor for which registers must leave room.
[[maybe_unused]] constexpr unsigned blocks_at_once(int kept) { return kept == 4 ? 4 : 2; }

/// The row of this warp in a launch with row_threads per block.
__device__ inline std::size_t row_of_warp() {
  return (std::size_t{blockIdx.x} * blockDim.x + threadIdx.x) / warp_size;
}

cuda::Grid grid_of_rows(std::size_t rows) { return cuda::grid_for(rows * warp_size, row_threads, 1u << 31); }

template <class T>
struct Normalising {
  T *sum, *out;  ///< sum is null without `b`
  float *mean, *inverse_deviation;
  const T *a, *b, *weight, *bias;  ///< mean and bias are null for RMS norm
  std::size_t rows, columns;
  double share;  ///< 1 / columns, to avoid a division in double per row
  float epsilon;
};

/// 1 / sqrt(variance + epsilon).
__device__ inline float inverse_deviation_of(double variance, float epsilon) {
  return 1 / sqrtf(static_cast<float>(variance + static_cast<double>(epsilon)));
}

/// x = a + b rounded to T, where x holds a; also stored in `sum`.
template <class T, int k>
__device__ inline void add_rounded(float (&x)[k], const T* b, T* sum) {
  float y[k];
  load(y, b);
#pragma unroll
  for (int j = 0; j < k; ++j) x[j] = to_f32(from_f32<T>(x[j] + y[j]));
  store(sum, x);
}

template <class T>
__device__ inline void store_statistics(const Normalising<T>& a, std::size_t row, float mean, float inverse) {
  if (a.mean) a.mean[row] = mean;
  a.inverse_deviation[row] = inverse;
}

/// For rows of at most 32 · kept packs.
template <class T, int kept, bool add, bool layer>
__global__ void __launch_bounds__(row_threads, blocks_at_once(kept)) normalise_kept(Normalising<T> a) {
  constexpr int width = pack_width<T>;
  const std::size_t row = row_of_warp();
  if (row >= a.rows) return;
  const auto packs = static_cast<int>(a.columns / width), lane = static_cast<int>(threadIdx.x % warp_size);
  const std::size_t first = row * a.columns;
  float x[kept][width], part = 0;
#pragma unroll
  for (int k = 0; k < kept; ++k) {
    const int at = (lane + k * 32) * width;
    if (lane + k * 32 >= packs) continue;
    load(x[k], a.a + first + at);
    if constexpr (add) add_rounded(x[k], a.b + first + at, a.sum + first + at);
    if constexpr (layer) {
#pragma unroll
      for (int j = 0; j < width; ++j) part += x[k][j];
    }
  }
  const float mean = layer ? static_cast<float>(warp_sum(static_cast<double>(part)) * a.share) : 0;
  part = 0;
#pragma unroll
  for (int k = 0; k < kept; ++k) {
    if (lane + k * 32 >= packs) continue;
#pragma unroll
    for (int j = 0; j < width; ++j) part += (x[k][j] - mean) * (x[k][j] - mean);
  }
  const float inverse = inverse_deviation_of(warp_sum(static_cast<double>(part)) * a.share, a.epsilon);
#pragma unroll
  for (int k = 0; k < kept; ++k) {
    const int at = (lane + k * 32) * width;
    if (lane + k * 32 >= packs) continue;
    float w[width];
    load(w, a.weight + at);
    if constexpr (layer) {
      float b[width];
      load(b, a.bias + at);
#pragma unroll
      for (int j = 0; j < width; ++j) x[k][j] = (x[k][j] - mean) * inverse * w[j] + b[j];
    } else {
#pragma unroll
      for (int j = 0; j < width; ++j) x[k][j] = x[k][j] * inverse * w[j];
    }
    store(a.out + first + at, x[k]);
  }
  if (lane == 0) store_statistics(a, row, mean, inverse);
}

/// For any row: reads it three times, one element at a time.
template <class T>
__global__ void __launch_bounds__(row_threads) normalise_any(Normalising<T> a) {
  const std::size_t row = row_of_warp(), lane = threadIdx.x % warp_size;
  if (row >= a.rows) return;
  const T* x = a.a + row * a.columns;
  double sum = 0;
  for (std::size_t i = lane; i < a.columns; i += warp_size) {
    float v[1];
    load(v, x + i);
    if (a.b) add_rounded(v, a.b + row * a.columns + i, a.sum + row * a.columns + i);
    sum += static_cast<double>(v[0]);
  }
  if (a.b) x = a.sum + row * a.columns;  // each lane reads only elements that it wrote
  const float mean = a.mean ? static_cast<float>(warp_sum(sum) * a.share) : 0;
  double squares = 0;
  for (std::size_t i = lane; i < a.columns; i += warp_size) {
    const float deviation = to_f32(x[i]) - mean;
    squares += static_cast<double>(deviation * deviation);
  }
  const float inverse = inverse_deviation_of(warp_sum(squares) * a.share, a.epsilon);
  for (std::size_t i = lane; i < a.columns; i += warp_size)
    a.out[row * a.columns + i] = from_f32<T>((to_f32(x[i]) - mean) * inverse * to_f32(a.weight[i]) +
                                             (a.bias ? to_f32(a.bias[i]) : -0.0f));  // adds nothing
  if (lane == 0) store_statistics(a, row, mean, inverse);
}

/// Packs of a row that a lane keeps: 4, 8, or 0 if rows are not kept.
template <class T, class... Pointers>
int kept_packs(std::size_t columns, const T* p, const Pointers*... others) {
  if (!rows_are_packs(columns, p, others...)) return 0;
  const std::size_t packs = columns / pack_width<T>;
  return packs <= 4 * warp_size ? 4 : packs <= 8 * warp_size ? 8 : 0;
}

template <class T, bool layer>
void normalise_rows(const char* name, const Normalising<T>& a, const Stream& stream) {
  const int kept = kept_packs(a.columns, a.out, a.sum, a.a, a.b, a.weight, a.bias);
  const auto with = [&](auto kernel) { cuda::launch(name, kernel, grid_of_rows(a.rows), stream, a); };
  if (kept == 4)
    a.b ? with(normalise_kept<T, 4, true, layer>) : with(normalise_kept<T, 4, false, layer>);
  else if (kept == 8)
    a.b ? with(normalise_kept<T, 8, true, layer>) : with(normalise_kept<T, 8, false, layer>);
  else
    with(normalise_any<T>);
}

/// A norm of a, or of sum = a + b if `sum` is defined; RMS norm if there is no mean and no bias.
void normalise(const char* name, const Tensor& sum, const Tensor& out, const Tensor& mean,
               const Tensor& inverse_deviation, const Tensor& a, const Tensor& b, const Tensor& weight,
               const Tensor& bias, float epsilon, const Stream& stream) {
  dispatch_dtype(out.dtype(), [&](auto t) {
    using T = decltype(t);
    const auto optional = [](const Tensor& x) { return x.defined() ? x.data<T>() : nullptr; };
    const Normalising<T> n{optional(sum),
                           out.data<T>(),
                           mean.defined() ? mean.data<float>() : nullptr,
                           inverse_deviation.data<float>(),
                           a.data<T>(),
                           optional(b),
                           weight.data<T>(),
                           optional(bias),
                           inverse_deviation.count(),
                           weight.count(),
                           1 / static_cast<double>(weight.count()),
                           epsilon};
    mean.defined() ? normalise_rows<T, true>(name, n, stream) : normalise_rows<T, false>(name, n, stream);
  });
}

template <class T>
struct NormaliseBackward {
  T* d_x;
  const T *d_out, *x, *weight;
  const float *mean, *inverse_deviation;  ///< mean is null for RMS norm
  std::size_t rows, columns;
  double share;  ///< 1 / columns
  bool accumulate;
};

/// With n the normalized values and g = d_out · weight, d_x = inverse_deviation · (g - mean(g) - n · mean(g
/// n)).
struct RowGradient {
  float mean, inverse, mean_g, mean_gn;  ///< mean and mean_g are 0 for RMS norm
  __device__ float operator()(float d_out, float x, float weight) const {
    return inverse * (d_out * weight - mean_g - (x - mean) * inverse * mean_gn);
  }
};

template <class T, int kept>
__global__ void __launch_bounds__(row_threads, blocks_at_once(kept)) backward_kept(NormaliseBackward<T> a) {
  constexpr int width = pack_width<T>;
  const std::size_t row = row_of_warp();
  if (row >= a.rows) return;
  const auto packs = static_cast<int>(a.columns / width), lane = static_cast<int>(threadIdx.x % warp_size);
  const std::size_t first = row * a.columns;
  RowGradient gradient{a.mean ? a.mean[row] : 0, a.inverse_deviation[row], 0, 0};
  Raw<T, width> raw_dy[kept], raw_x[kept];
  float part_g = 0, part_gn = 0;
#pragma unroll
  for (int k = 0; k < kept; ++k) {
    const int at = (lane + k * 32) * width;
    if (lane + k * 32 >= packs) continue;
    raw_dy[k] = Raw<T, width>::at(a.d_out + first + at), raw_x[k] = Raw<T, width>::at(a.x + first + at);
    float dy[width], x[width], w[width];
    raw_dy[k].widen(dy), raw_x[k].widen(x), load(w, a.weight + at);
#pragma unroll
    for (int j = 0; j < width; ++j) {
      const float g = dy[j] * w[j];
      part_g += g;
      part_gn += g * ((x[j] - gradient.mean) * gradient.inverse);
    }
  }
  if (a.mean) gradient.mean_g = static_cast<float>(warp_sum(static_cast<double>(part_g)) * a.share);
  gradient.mean_gn = static_cast<float>(warp_sum(static_cast<double>(part_gn)) * a.share);
#pragma unroll
  for (int k = 0; k < kept; ++k) {
    const int at = (lane + k * 32) * width;
    if (lane + k * 32 >= packs) continue;
    float dy[width], x[width], w[width], d[width] = {};
    raw_dy[k].hold(), raw_x[k].hold();
    raw_dy[k].widen(dy), raw_x[k].widen(x), load(w, a.weight + at);
    if (a.accumulate) load(d, a.d_x + first + at);
#pragma unroll
    for (int j = 0; j < width; ++j) d[j] += gradient(dy[j], x[j], w[j]);
    store(a.d_x + first + at, d);
  }
}

template <class T>
__global__ void __launch_bounds__(row_threads) backward_any(NormaliseBackward<T> a) {
  const std::size_t row = row_of_warp(), lane = threadIdx.x % warp_size;
  if (row >= a.rows) return;
  const std::size_t first = row * a.columns;
  RowGradient gradient{a.mean ? a.mean[row] : 0, a.inverse_deviation[row], 0, 0};
  double sum_g = 0, sum_gn = 0;
  for (std::size_t i = lane; i < a.columns; i += warp_size) {
    const float g = to_f32(a.d_out[first + i]) * to_f32(a.weight[i]);
    sum_g += static_cast<double>(g);
    sum_gn += static_cast<double>(g * ((to_f32(a.x[first + i]) - gradient.mean) * gradient.inverse));
  }
  if (a.mean) gradient.mean_g = static_cast<float>(warp_sum(sum_g) * a.share);
  gradient.mean_gn = static_cast<float>(warp_sum(sum_gn) * a.share);
  for (std::size_t i = lane; i < a.columns; i += warp_size) {
    const float before = a.accumulate ? to_f32(a.d_x[first + i]) : 0;
    a.d_x[first + i] = from_f32<T>(
        before + gradient(to_f32(a.d_out[first + i]), to_f32(a.x[first + i]), to_f32(a.weight[i])));
  }
}

template <class T, class G>
struct ColumnSums {
  G *d_weight, *d_bias;  ///< either may be null
  const T *d_out, *x;
  const float *mean, *inverse_deviation;  ///< mean is null for RMS norm
  std::size_t rows, columns;
  bool accumulate;
  double* slices;      ///< [slice, weight or bias, column]; null if there is one slice
  std::size_t height;  ///< rows of a slice
};

constexpr unsigned column_threads = 512;
constexpr std::size_t row_batch = 4;
/// Blocks that keep a large device busy; not those of the device at hand, so that its size changes no bits.
constexpr std::size_t column_sum_blocks = 264;

template <class T, class G>
__device__ inline void store_column_sum(const ColumnSums<T, G>& a, std::size_t column, bool is_bias,
                                        double sum) {
  G* const out = is_bias ? a.d_bias : a.d_weight;
  if (!out) return;
  if (a.accumulate) sum += static_cast<double>(to_f32(out[column]));
  out[column] = from_f32<G>(static_cast<float>(sum));
}

/// Threads of a row: they read 128 bytes of it, one cache line, or 16 elements if rows are not aligned.
__host__ __device__ constexpr unsigned threads_across(int width) { return width == 1 ? 16 : 8; }

/// A thread reads `width` elements of a row. Threads stride over the rows; four rows are summed in f32, these
/// sums in double.
template <class T, class G, int width>
__global__ void __launch_bounds__(column_threads) sum_columns(ColumnSums<T, G> a) {
  constexpr unsigned across = threads_across(width);
  constexpr unsigned block_columns = across * width;
  RZ_SHARED(double, parts, column_threads / warp_size * block_columns * 2);

  const unsigned place = threadIdx.x % across, first = place * width;
  const std::size_t column = std::size_t{blockIdx.x} * block_columns + first;
  const std::size_t lanes = blockDim.x / across;
  const std::size_t begin = blockIdx.y * a.height,
                    end = begin + a.height < a.rows ? begin + a.height : a.rows;
  double weight[width] = {}, bias[width] = {};
  if (column < a.columns)
    for (std::size_t from = begin + threadIdx.x / across; from < end; from += lanes * row_batch) {
      float w[width] = {}, b[width] = {};
#pragma unroll
      for (std::size_t i = 0; i < row_batch; ++i) {
        const std::size_t row = from + i * lanes;
        if (row >= end) continue;
        float dy[width], x[width];
        load(dy, a.d_out + row * a.columns + column), load(x, a.x + row * a.columns + column);
        const float mean = a.mean ? a.mean[row] : 0, inverse = a.inverse_deviation[row];
#pragma unroll
        for (int j = 0; j < width; ++j) w[j] += dy[j] * ((x[j] - mean) * inverse), b[j] += dy[j];
      }
#pragma unroll
      for (int j = 0; j < width; ++j)
        weight[j] += static_cast<double>(w[j]), bias[j] += static_cast<double>(b[j]);
    }
#pragma unroll
  for (int j = 0; j < width; ++j)
    for (unsigned bits = across; bits < warp_size; bits *= 2) {
      weight[j] += __shfl_xor_sync(whole_warp, weight[j], static_cast<int>(bits));
      bias[j] += __shfl_xor_sync(whole_warp, bias[j], static_cast<int>(bits));
    }
  if (threadIdx.x % warp_size < across)
    for (int j = 0; j < width; ++j) {
      double* const to =
          parts + (threadIdx.x / warp_size * block_columns + first + static_cast<unsigned>(j)) * 2;
      to[0] = weight[j], to[1] = bias[j];
    }
  __syncthreads();

  for (unsigned mine = threadIdx.x; mine < 2 * block_columns; mine += blockDim.x) {
    const bool is_bias = mine >= block_columns;
    const unsigned at = mine % block_columns;
    const std::size_t target = std::size_t{blockIdx.x} * block_columns + at;
    if (target >= a.columns) continue;
    double sum = 0;
    for (unsigned w = 0; w < blockDim.x / warp_size; ++w)
      sum += parts[(w * block_columns + at) * 2 + is_bias];
    if (a.slices)
      a.slices[(2 * blockIdx.y + is_bias) * a.columns + target] = sum;
    else
      store_column_sum(a, target, is_bias, sum);
  }
}

template <class T, class G>
__global__ void sum_slices(ColumnSums<T, G> a, std::size_t count) {
  const std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= 2 * a.columns) return;
  double sum = 0;
#pragma unroll 8
  for (std::size_t k = 0; k < count; ++k) sum += a.slices[2 * k * a.columns + i];
  store_column_sum(a, i % a.columns, i >= a.columns, sum);
}

template <class T, class G>
void launch_sum_columns(const char* name, ColumnSums<T, G> a, const Stream& stream) {
  constexpr int width = pack_width<T>;
  const bool packs = rows_are_packs(a.columns, a.d_out, a.x);
  const unsigned across = threads_across(packs ? width : 1), block_columns = across * (packs ? width : 1);
  const unsigned threads = threads_for_row(a.rows * across, column_threads);
  const std::size_t blocks = (a.columns + block_columns - 1) / block_columns,
                    batch = threads / across * row_batch, batches = (a.rows + batch - 1) / batch,
                    wanted = std::clamp<std::size_t>(column_sum_blocks / blocks, 1,
                                                     std::max<std::size_t>(batches, 1));
  a.height = std::max<std::size_t>((batches + wanted - 1) / wanted, 1) * batch;
  const std::size_t count = std::max<std::size_t>((a.rows + a.height - 1) / a.height, 1);
  if (count > 1) a.slices = static_cast<double*>(stream.workspace(count * 2 * a.columns * sizeof(double)));
  const cuda::Grid grid{{static_cast<unsigned>(blocks), static_cast<unsigned>(count)}, {threads}};
  cuda::launch(name, packs ? sum_columns<T, G, width> : sum_columns<T, G, 1>, grid, stream, a);
  if (count > 1) cuda::launch(name, sum_slices<T, G>, cuda::grid_for(2 * a.columns, 64), stream, a, count);
}

/// RMS norm if `mean` is undefined.
void norm_backward(const char* name, const Tensor& d_x, const Tensor& d_weight, const Tensor& d_bias,
                   const Tensor& d_out, const Tensor& x, const Tensor& weight, const Tensor& mean,
                   const Tensor& inverse_deviation, Into into_x, Into into_parameters, const Stream& stream) {
  const DType gradients = d_weight.defined() ? d_weight.dtype()
                          : d_bias.defined() ? d_bias.dtype()
                                             : x.dtype();
  dispatch_dtype(x.dtype(), [&](auto t) {
    using T = decltype(t);
    const std::size_t rows = inverse_deviation.count(), columns = weight.count();
    const T *dy = d_out.data<T>(), *v = x.data<T>();
    const float *m = mean.defined() ? mean.data<float>() : nullptr, *r = inverse_deviation.data<float>();
    // The sums first, since d_x may alias d_out.
    if (d_weight.defined() || d_bias.defined())
      dispatch_gradient_dtype<T>(gradients, [&](auto g) {
        using G = decltype(g);
        const auto gradient = [](const Tensor& d) { return d.defined() ? d.data<G>() : nullptr; };
        launch_sum_columns(name,
                           ColumnSums<T, G>{gradient(d_weight), gradient(d_bias), dy, v, m, r, rows, columns,
                                            into_parameters == Into::accumulate, nullptr, 0},
                           stream);
      });
    const NormaliseBackward<T> a{d_x.data<T>(),
                                 dy,
                                 v,
                                 weight.data<T>(),
                                 m,
                                 r,
                                 rows,
                                 columns,
                                 1 / static_cast<double>(columns),
                                 into_x == Into::accumulate};
    const int kept = kept_packs(columns, a.d_x, a.d_out, a.x, a.weight);
    cuda::launch(name,
                 kept == 4   ? backward_kept<T, 4>
                 : kept == 8 ? backward_kept<T, 8>
                             : backward_any<T>,
                 grid_of_rows(rows), stream, a);
  });
}

}  // namespace

void layer_norm(const Tensor& out, const Tensor& mean, const Tensor& inverse_deviation, const Tensor& x,
                const Tensor& weight, const Tensor& bias, float epsilon, const Stream& stream) {
  normalise("layer_norm", {}, out, mean, inverse_deviation, x, {}, weight, bias, epsilon, stream);
}

void add_layer_norm(const Tensor& sum, const Tensor& out, const Tensor& mean, const Tensor& inverse_deviation,
                    const Tensor& a, const Tensor& b, const Tensor& weight, const Tensor& bias, float epsilon,
                    const Stream& stream) {
  normalise("add_layer_norm", sum, out, mean, inverse_deviation, a, b, weight, bias, epsilon, stream);
}

void layer_norm_backward(const Tensor& d_x, const Tensor& d_weight, const Tensor& d_bias, const Tensor& d_out,
                         const Tensor& x, const Tensor& weight, const Tensor& mean,
                         const Tensor& inverse_deviation, Into into_x, Into into_parameters,
                         const Stream& stream) {
  norm_backward("layer_norm_backward", d_x, d_weight, d_bias, d_out, x, weight, mean, inverse_deviation,
                into_x, into_parameters, stream);
}

void rms_norm(const Tensor& out, const Tensor& inverse_rms, const Tensor& x, const Tensor& weight,
              float epsilon, const Stream& stream) {
  normalise("rms_norm", {}, out, {}, inverse_rms, x, {}, weight, {}, epsilon, stream);
}

void add_rms_norm(const Tensor& sum, const Tensor& out, const Tensor& inverse_rms, const Tensor& a,
                  const Tensor& b, const Tensor& weight, float epsilon, const Stream& stream) {
  normalise("add_rms_norm", sum, out, {}, inverse_rms, a, b, weight, {}, epsilon, stream);
}

void rms_norm_backward(const Tensor& d_x, const Tensor& d_weight, const Tensor& d_out, const Tensor& x,
                       const Tensor& weight, const Tensor& inverse_rms, Into into_x, Into into_weight,
                       const Stream& stream) {
  norm_backward("rms_norm_backward", d_x, d_weight, {}, d_out, x, weight, {}, inverse_rms, into_x,
                into_weight, stream);
}

}  // namespace rz::ops::device
