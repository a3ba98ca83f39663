// Norms of images on a device. Sums by channel or group take a block, in an order that depends on the shapes
// only; results take a thread per element.

#include "tensor/kernels/block_sum.h"
#include "tensor/kernels/check.h"
#include "tensor/kernels/device_ops.h"
#include "tensor/kernels/dtype_dispatch.h"
#include "tensor/kernels/image/batch_norm.h"

namespace rz::ops::device {

namespace {

using image::ChannelSizes;

__device__ inline std::size_t first_element() { return std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; }
__device__ inline std::size_t elements_at_once() { return std::size_t{gridDim.x} * blockDim.x; }

/// Element k of a channel.
__device__ inline std::size_t element_of_channel(const ChannelSizes& s, std::size_t c, std::size_t k) {
  return (k / s.positions * s.channels + c) * s.positions + k % s.positions;
}

template <class T>
__global__ void sum_channels(double* __restrict__ sums, const T* __restrict__ x, ChannelSizes s) {
  const std::size_t c = blockIdx.x;
  double first = 0, second = 0;
  for (std::size_t k = threadIdx.x; k < s.images * s.positions; k += blockDim.x) {
    const auto v = static_cast<double>(to_f32(x[element_of_channel(s, c, k)]));
    first += v, second += v * v;
  }
  first = block_sum(first), second = block_sum(second);
  if (threadIdx.x != 0) return;
  sums[c] = first, sums[s.channels + c] = second;
  if (c == 0) sums[2 * s.channels] = static_cast<double>(s.images * s.positions);
}

template <class T>
__global__ void sum_channel_gradients(double* __restrict__ sums, const T* __restrict__ d_out,
                                      const T* __restrict__ x, const float* __restrict__ mean,
                                      const float* __restrict__ inverse_deviation, ChannelSizes s) {
  const std::size_t c = blockIdx.x;
  const auto m = static_cast<double>(mean[c]), r = static_cast<double>(inverse_deviation[c]);
  double first = 0, second = 0;
  for (std::size_t k = threadIdx.x; k < s.images * s.positions; k += blockDim.x) {
    const std::size_t at = element_of_channel(s, c, k);
    const auto g = static_cast<double>(to_f32(d_out[at]));
    first += g, second += g * ((static_cast<double>(to_f32(x[at])) - m) * r);
  }
  first = block_sum(first), second = block_sum(second);
  if (threadIdx.x == 0) sums[c] = first, sums[s.channels + c] = second;
}

/// One block.
__global__ void finish_statistics(float* __restrict__ mean, float* __restrict__ inverse_deviation,
                                  image::RunningPointers r, const double* __restrict__ sums,
                                  std::size_t channels, float epsilon) {
  const std::int64_t batches = r.batches ? *r.batches + 1 : 0;
  __syncthreads();  // all have read it
  if (threadIdx.x == 0 && r.batches) *r.batches = batches;
  for (std::size_t c = threadIdx.x; c < channels; c += blockDim.x)
    image::statistics_of_channel(c, channels, sums, epsilon, mean, inverse_deviation, r, batches);
}

__global__ void read_running(float* __restrict__ mean, float* __restrict__ inverse_deviation,
                             image::RunningPointers r, std::size_t channels, float epsilon) {
  for (std::size_t c = first_element(); c < channels; c += elements_at_once()) {
    mean[c] = r.mean[c];
    inverse_deviation[c] = image::inverse_deviation(static_cast<double>(r.variance[c]), epsilon);
  }
}

/// Statistics of a plane are element plane / planes_of_statistic of theirs, modulo their number.
template <class T>
struct Normalizing {
  const T *x, *weight;
  const float *mean, *inverse_deviation;
  ChannelSizes s;
  std::size_t planes_of_statistic, statistics;

  __device__ std::size_t statistic(std::size_t plane) const {
    return plane / planes_of_statistic % statistics;
  }
  __device__ float normalized(std::size_t i, std::size_t statistic) const {
    return (to_f32(x[i]) - mean[statistic]) * inverse_deviation[statistic];
  }
  std::size_t count() const { return s.images * s.channels * s.positions; }
};

template <class T>
__global__ void normalize(Normalizing<T> a, T* __restrict__ out, const T* __restrict__ bias) {
  for (std::size_t i = first_element(); i < a.s.images * a.s.channels * a.s.positions;
       i += elements_at_once()) {
    const std::size_t plane = i / a.s.positions, c = plane % a.s.channels;
    out[i] = from_f32<T>(a.normalized(i, a.statistic(plane)) * to_f32(a.weight[c]) + to_f32(bias[c]));
  }
}

/// The backward of a batch; both sums are null in evaluation.
template <class T>
__global__ void batch_backward(Normalizing<T> a, T* __restrict__ d_x, const T* __restrict__ d_out,
                               const double* __restrict__ forward_sums,
                               const double* __restrict__ backward_sums, bool accumulate) {
  const double share = forward_sums ? 1 / forward_sums[2 * a.s.channels] : 0;
  for (std::size_t i = first_element(); i < a.s.images * a.s.channels * a.s.positions;
       i += elements_at_once()) {
    const std::size_t c = i / a.s.positions % a.s.channels;
    const float w = to_f32(a.weight[c]), r = a.inverse_deviation[c], g = to_f32(d_out[i]) * w;
    float gradient = g;
    if (backward_sums) {
      const float mean_g = static_cast<float>(backward_sums[c] * share) * w;
      const float mean_gn = static_cast<float>(backward_sums[a.s.channels + c] * share) * w;
      gradient = g - mean_g - a.normalized(i, c) * mean_gn;
    }
    gradient *= r;
    d_x[i] = from_f32<T>(accumulate ? to_f32(d_x[i]) + gradient : gradient);
  }
}

template <class G>
__global__ void store_gradients(G* __restrict__ d_weight, G* __restrict__ d_bias,
                                const double* __restrict__ sums, std::size_t channels, bool accumulate) {
  for (std::size_t c = first_element(); c < channels; c += elements_at_once()) {
    const auto store = [&](G* to, double sum) {
      if (to)
        to[c] = from_f32<G>(static_cast<float>(accumulate ? static_cast<double>(to_f32(to[c])) + sum : sum));
    };
    store(d_bias, sums[c]), store(d_weight, sums[channels + c]);
  }
}

/// A block per group.
template <class T>
__global__ void group_statistics(float* __restrict__ mean, float* __restrict__ inverse_deviation,
                                 const T* __restrict__ x, std::size_t elements, float epsilon) {
  const T* const group = x + std::size_t{blockIdx.x} * elements;
  double part = 0;
  for (std::size_t k = threadIdx.x; k < elements; k += blockDim.x)
    part += static_cast<double>(to_f32(group[k]));
  const double average = block_sum(part) / static_cast<double>(elements);
  part = 0;
  for (std::size_t k = threadIdx.x; k < elements; k += blockDim.x) {
    const double deviation = static_cast<double>(to_f32(group[k])) - average;
    part += deviation * deviation;
  }
  const double variance = block_sum(part) / static_cast<double>(elements);
  if (threadIdx.x != 0) return;
  mean[blockIdx.x] = static_cast<float>(average);
  inverse_deviation[blockIdx.x] = image::inverse_deviation(variance, epsilon);
}

/// planes[p] = {Σ d_out, Σ d_out · n} of a plane; a block per plane.
template <class T>
__global__ void plane_gradients(Normalizing<T> a, double* __restrict__ planes, const T* __restrict__ d_out) {
  const std::size_t plane = blockIdx.x, at = plane * a.s.positions, statistic = a.statistic(plane);
  double first = 0, second = 0;
  for (std::size_t k = threadIdx.x; k < a.s.positions; k += blockDim.x) {
    const auto g = static_cast<double>(to_f32(d_out[at + k]));
    first += g, second += g * static_cast<double>(a.normalized(at + k, statistic));
  }
  first = block_sum(first), second = block_sum(second);
  if (threadIdx.x == 0) planes[2 * plane] = first, planes[2 * plane + 1] = second;
}

/// sums = {Σ over images by channel} of the first and of the second sums of planes.
__global__ void sum_images(double* __restrict__ sums, const double* __restrict__ planes, ChannelSizes s) {
  for (std::size_t k = first_element(); k < 2 * s.channels; k += elements_at_once()) {
    double sum = 0;
    for (std::size_t n = 0; n < s.images; ++n)
      sum += planes[2 * (n * s.channels + k % s.channels) + k / s.channels];
    sums[k] = sum;
  }
}

/// A block per group.
template <class T>
__global__ void group_backward(Normalizing<T> a, T* __restrict__ d_x, const T* __restrict__ d_out,
                               const double* __restrict__ planes, bool accumulate) {
  const std::size_t group = blockIdx.x, channels = a.planes_of_statistic, first = group * channels;
  double g = 0, gn = 0;
  for (std::size_t p = threadIdx.x; p < channels; p += blockDim.x) {
    const auto w = static_cast<double>(to_f32(a.weight[(first + p) % a.s.channels]));
    g += w * planes[2 * (first + p)], gn += w * planes[2 * (first + p) + 1];
  }
  const std::size_t elements = channels * a.s.positions;
  const auto count = static_cast<double>(elements);
  const float mean_g = static_cast<float>(block_sum(g) / count),
              mean_gn = static_cast<float>(block_sum(gn) / count), r = a.inverse_deviation[group];
  for (std::size_t k = threadIdx.x; k < elements; k += blockDim.x) {
    const std::size_t i = group * elements + k;
    const float w = to_f32(a.weight[i / a.s.positions % a.s.channels]);
    const float gradient = r * (to_f32(d_out[i]) * w - mean_g - a.normalized(i, group) * mean_gn);
    d_x[i] = from_f32<T>(accumulate ? to_f32(d_x[i]) + gradient : gradient);
  }
}

template <class T>
Normalizing<T> normalizing(const ChannelSizes& s, const Tensor& x, const Tensor& weight, const Tensor& mean,
                           const Tensor& inverse_deviation) {
  const bool groups = mean.shape().dims() == 2;
  return {x.data<T>(),
          weight.data<T>(),
          mean.data<float>(),
          inverse_deviation.data<float>(),
          s,
          groups ? s.channels / last(mean) : 1,
          mean.count()};
}

unsigned blocks(std::size_t n) { return static_cast<unsigned>(n); }

/// Errc::invalid_argument if one launch would write gradients of two types.
void store_parameter_gradients(const char* op, const Tensor& d_weight, const Tensor& d_bias,
                               const double* sums, std::size_t channels, Into into, const Stream& stream) {
  const auto store = [&](const Tensor& w, const Tensor& b) {
    const Tensor& any = w.defined() ? w : b;
    if (!any.defined()) return;
    dispatch_dtype(any.dtype(), [&](auto t) {
      using G = decltype(t);
      cuda::launch(op, store_gradients<G>, cuda::grid_for(channels), stream,
                   w.defined() ? w.data<G>() : nullptr, b.defined() ? b.data<G>() : nullptr, sums, channels,
                   into == Into::accumulate);
    });
  };
  if (!d_weight.defined() || !d_bias.defined() || d_weight.dtype() == d_bias.dtype())
    return store(d_weight, d_bias);
  store(d_weight, {}), store({}, d_bias);
}

}  // namespace

void batch_norm_sums(const Tensor& sums, const Tensor& x, const Stream& stream) {
  const ChannelSizes s = image::channel_sizes("batch_norm_sums", x);
  dispatch_dtype(x.dtype(), [&](auto t) {
    using T = decltype(t);
    cuda::launch("batch_norm_sums", sum_channels<T>,
                 {{blocks(s.channels)}, {threads_for_row(s.images * s.positions)}}, stream,
                 sums.data<double>(), x.data<T>(), s);
  });
}

void batch_norm_statistics(const Tensor& mean, const Tensor& inverse_deviation,
                           const RunningStatistics& running, const Tensor& sums, float epsilon,
                           const Stream& stream) {
  cuda::launch("batch_norm_statistics", finish_statistics, {{1}, {threads_for_row(mean.count())}}, stream,
               mean.data<float>(), inverse_deviation.data<float>(), image::pointers(running),
               sums.data<double>(), mean.count(), epsilon);
}

void batch_norm_running(const Tensor& mean, const Tensor& inverse_deviation, const RunningStatistics& running,
                        float epsilon, const Stream& stream) {
  cuda::launch("batch_norm_running", read_running, cuda::grid_for(mean.count()), stream, mean.data<float>(),
               inverse_deviation.data<float>(), image::pointers(running), mean.count(), epsilon);
}

void batch_norm(const Tensor& out, const Tensor& x, const Tensor& mean, const Tensor& inverse_deviation,
                const Tensor& weight, const Tensor& bias, const Stream& stream) {
  const ChannelSizes s = image::channel_sizes("batch_norm", x);
  dispatch_dtype(x.dtype(), [&](auto t) {
    using T = decltype(t);
    cuda::launch("batch_norm", normalize<T>, cuda::grid_for(x.count()), stream,
                 normalizing<T>(s, x, weight, mean, inverse_deviation), out.data<T>(), bias.data<T>());
  });
}

void batch_norm_backward_sums(const Tensor& sums, const Tensor& d_out, const Tensor& x, const Tensor& mean,
                              const Tensor& inverse_deviation, const Stream& stream) {
  const ChannelSizes s = image::channel_sizes("batch_norm_backward_sums", x);
  dispatch_dtype(x.dtype(), [&](auto t) {
    using T = decltype(t);
    cuda::launch("batch_norm_backward_sums", sum_channel_gradients<T>,
                 {{blocks(s.channels)}, {threads_for_row(s.images * s.positions)}}, stream,
                 sums.data<double>(), d_out.data<T>(), x.data<T>(), mean.data<float>(),
                 inverse_deviation.data<float>(), s);
  });
}

void batch_norm_parameters_backward(const Tensor& d_weight, const Tensor& d_bias, const Tensor& sums,
                                    Into into, const Stream& stream) {
  store_parameter_gradients("batch_norm_parameters_backward", d_weight, d_bias, sums.data<double>(),
                            sums.count() / 2, into, stream);
}

void batch_norm_backward(const Tensor& d_x, const Tensor& d_out, const Tensor& x, const Tensor& weight,
                         const Tensor& mean, const Tensor& inverse_deviation, const Tensor& forward_sums,
                         const Tensor& backward_sums, Into into, const Stream& stream) {
  const ChannelSizes s = image::channel_sizes("batch_norm_backward", x);
  const auto sums = [](const Tensor& t) { return t.defined() ? t.data<double>() : nullptr; };
  dispatch_dtype(x.dtype(), [&](auto t) {
    using T = decltype(t);
    cuda::launch("batch_norm_backward", batch_backward<T>, cuda::grid_for(x.count()), stream,
                 normalizing<T>(s, x, weight, mean, inverse_deviation), d_x.data<T>(), d_out.data<T>(),
                 sums(forward_sums), sums(backward_sums), into == Into::accumulate);
  });
}

void group_norm(const Tensor& out, const Tensor& mean, const Tensor& inverse_deviation, const Tensor& x,
                const Tensor& weight, const Tensor& bias, float epsilon, const Stream& stream) {
  const ChannelSizes s = image::channel_sizes("group_norm", x);
  if (x.count() == 0) return;
  const std::size_t elements = x.count() / mean.count();
  dispatch_dtype(x.dtype(), [&](auto t) {
    using T = decltype(t);
    cuda::launch("group_norm", group_statistics<T>, {{blocks(mean.count())}, {threads_for_row(elements)}},
                 stream, mean.data<float>(), inverse_deviation.data<float>(), x.data<T>(), elements, epsilon);
    cuda::launch("group_norm", normalize<T>, cuda::grid_for(x.count()), stream,
                 normalizing<T>(s, x, weight, mean, inverse_deviation), out.data<T>(), bias.data<T>());
  });
}

void group_norm_backward(const Tensor& d_x, const Tensor& d_weight, const Tensor& d_bias, const Tensor& d_out,
                         const Tensor& x, const Tensor& weight, const Tensor& mean,
                         const Tensor& inverse_deviation, Into into_x, Into into_parameters,
                         const Stream& stream) {
  constexpr const char* op = "group_norm_backward";
  const ChannelSizes s = image::channel_sizes(op, x);
  const std::size_t count = s.images * s.channels;
  auto* const planes = static_cast<double*>(stream.workspace((2 * count + 2 * s.channels) * sizeof(double)));
  double* const sums = planes + 2 * count;
  dispatch_dtype(x.dtype(), [&](auto t) {
    using T = decltype(t);
    const Normalizing<T> a = normalizing<T>(s, x, weight, mean, inverse_deviation);
    cuda::launch(op, plane_gradients<T>, {{blocks(count)}, {threads_for_row(s.positions)}}, stream, a, planes,
                 d_out.data<T>());
    cuda::launch(op, sum_images, cuda::grid_for(2 * s.channels), stream, sums,
                 static_cast<const double*>(planes), s);
    cuda::launch(op, group_backward<T>,
                 {{blocks(mean.count())}, {threads_for_row(x.count() / (mean.count() ? mean.count() : 1))}},
                 stream, a, d_x.data<T>(), d_out.data<T>(), static_cast<const double*>(planes),
                 into_x == Into::accumulate);
  });
  store_parameter_gradients(op, d_weight, d_bias, sums, s.channels, into_parameters, stream);
}

}  // namespace rz::ops::device
