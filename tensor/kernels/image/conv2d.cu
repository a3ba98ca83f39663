// Convolutions on a device as products with columns (im2col), image by image and group by group: forward and
// d_weight of a tile of positions, d_x of a block of channels, so that the columns take a bounded part of the
// stream's workspace. Depthwise convolutions have kernels of their own, a thread per element. Each sum has an
// order that depends on the shapes only.

#include <algorithm>

#include "comm/core/environment.h"
#include "comm/device/memory.h"
#include "tensor/kernels/block_sum.h"
#include "tensor/kernels/device_ops.h"
#include "tensor/kernels/dtype_dispatch.h"
#include "tensor/kernels/image/conv2d.h"
#include "tensor/kernels/linear_algebra/blas.h"

namespace rz::ops::device {

namespace {

using image::ConvSizes;

constexpr std::size_t column_bytes = std::size_t{8} << 20;

/// Sizes as a kernel reads them.
struct Plane {
  long in_h, in_w, out_h, out_w, kernel_h, kernel_w, stride_h, stride_w, padding_h, padding_w, dilation_h,
      dilation_w;

  explicit Plane(const ConvSizes& s)
      : in_h(number(s.y.in)),
        in_w(number(s.x.in)),
        out_h(number(s.y.out)),
        out_w(number(s.x.out)),
        kernel_h(number(s.y.kernel)),
        kernel_w(number(s.x.kernel)),
        stride_h(number(s.y.stride)),
        stride_w(number(s.x.stride)),
        padding_h(number(s.y.padding)),
        padding_w(number(s.x.padding)),
        dilation_h(number(s.y.dilation)),
        dilation_w(number(s.x.dilation)) {}
  static long number(std::size_t n) { return static_cast<long>(n); }

  /// The input under tap (i, j) of output (y, x); negative outside of the image.
  __device__ long input(long y, long x, long i, long j) const {
    const long h = y * stride_h + i * dilation_h - padding_h, w = x * stride_w + j * dilation_w - padding_w;
    return h >= 0 && h < in_h && w >= 0 && w < in_w ? h * in_w + w : -1;
  }
  /// Calls f(tap, position) for the outputs that read input (h, w), in the order of taps.
  template <class F>
  __device__ void each_output(long h, long w, const F& f) const {
    for (long i = 0; i < kernel_h; ++i) {
      const long down = h + padding_h - i * dilation_h, y = down / stride_h;
      if (down < 0 || down % stride_h != 0 || y >= out_h) continue;
      for (long j = 0; j < kernel_w; ++j) {
        const long right = w + padding_w - j * dilation_w, x = right / stride_w;
        if (right < 0 || right % stride_w != 0 || x >= out_w) continue;
        f(i * kernel_w + j, y * out_w + x);
      }
    }
  }
};

__device__ inline long thread_number() { return long{blockIdx.x} * blockDim.x + threadIdx.x; }
__device__ inline long thread_count() { return long{gridDim.x} * blockDim.x; }

template <class T>
__global__ void fill_rows(T* __restrict__ out, const T* __restrict__ bias, long rows, long positions) {
  for (long i = thread_number(); i < rows * positions; i += thread_count()) out[i] = bias[i / positions];
}

/// Row (channel, i, j) of the columns has the input under tap (i, j) of positions begin … begin + count - 1.
template <class T>
__global__ void read_columns(T* __restrict__ to, const T* __restrict__ x, Plane p, long rows, long begin,
                             long count) {
  const long taps = p.kernel_h * p.kernel_w;
  for (long k = thread_number(); k < rows * count; k += thread_count()) {
    const long row = k / count, position = begin + k % count, tap = row % taps;
    const long at = p.input(position / p.out_w, position % p.out_w, tap / p.kernel_w, tap % p.kernel_w);
    to[k] = at < 0 ? T{} : x[row / taps * p.in_h * p.in_w + at];
  }
}

/// d_x of a block of channels, from the gradients of its columns.
template <class T>
__global__ void gather_columns(T* __restrict__ d_x, const float* __restrict__ from, Plane p, long channels,
                               bool accumulate) {
  const long plane = p.in_h * p.in_w, positions = p.out_h * p.out_w, taps = p.kernel_h * p.kernel_w;
  for (long k = thread_number(); k < channels * plane; k += thread_count()) {
    const float* const rows = from + k / plane * taps * positions;
    float sum = 0;
    p.each_output(k % plane / p.in_w, k % p.in_w,
                  [&](long tap, long position) { sum += rows[tap * positions + position]; });
    d_x[k] = from_f32<T>(accumulate ? to_f32(d_x[k]) + sum : sum);
  }
}

template <class T>
__global__ void store_sums(T* __restrict__ out, const float* __restrict__ in, long count, bool accumulate) {
  for (long k = thread_number(); k < count; k += thread_count())
    out[k] = from_f32<T>(accumulate ? to_f32(out[k]) + in[k] : in[k]);
}

template <class G>
__device__ inline void store_sum(G* to, double sum, bool accumulate) {
  *to = from_f32<G>(static_cast<float>(accumulate ? static_cast<double>(to_f32(*to)) + sum : sum));
}

/// A block per channel.
template <class T, class G>
__global__ void bias_gradient(G* __restrict__ d_bias, const T* __restrict__ d_out, long images, long outputs,
                              long positions, bool accumulate) {
  const long o = blockIdx.x;
  double part = 0;
  for (long k = threadIdx.x; k < images * positions; k += blockDim.x)
    part += static_cast<double>(to_f32(d_out[(k / positions * outputs + o) * positions + k % positions]));
  const double sum = block_sum(part);
  if (threadIdx.x == 0) store_sum(d_bias + o, sum, accumulate);
}

// ---- depthwise

template <class T>
struct Depthwise {
  Plane p;
  long images, channels, of_channel;  ///< outputs of a channel
  __device__ long plane() const { return p.in_h * p.in_w; }
  __device__ long positions() const { return p.out_h * p.out_w; }
  __device__ long taps() const { return p.kernel_h * p.kernel_w; }
};

template <class T>
__global__ void depthwise(Depthwise<T> a, T* __restrict__ out, const T* __restrict__ x,
                          const T* __restrict__ weight, const T* __restrict__ bias) {
  const long positions = a.positions(), outputs = a.channels * a.of_channel;
  for (long k = thread_number(); k < a.images * outputs * positions; k += thread_count()) {
    const long plane = k / positions, o = plane % outputs, position = k % positions;
    const T* const in = x + plane / a.of_channel * a.plane();
    const T* w = weight + o * a.taps();
    float sum = bias ? to_f32(bias[o]) : 0;
    for (long i = 0; i < a.p.kernel_h; ++i)
      for (long j = 0; j < a.p.kernel_w; ++j, ++w) {
        const long at = a.p.input(position / a.p.out_w, position % a.p.out_w, i, j);
        if (at >= 0) sum += to_f32(*w) * to_f32(in[at]);
      }
    out[k] = from_f32<T>(sum);
  }
}

template <class T>
__global__ void depthwise_input(Depthwise<T> a, T* __restrict__ d_x, const T* __restrict__ d_out,
                                const T* __restrict__ weight, bool accumulate) {
  const long plane = a.plane(), positions = a.positions();
  for (long k = thread_number(); k < a.images * a.channels * plane; k += thread_count()) {
    const long channel = k / plane % a.channels;
    float sum = 0;
    for (long m = 0; m < a.of_channel; ++m) {
      const T* const from = d_out + (k / plane * a.of_channel + m) * positions;
      const T* const w = weight + (channel * a.of_channel + m) * a.taps();
      a.p.each_output(k % plane / a.p.in_w, k % a.p.in_w,
                      [&](long tap, long position) { sum += to_f32(w[tap]) * to_f32(from[position]); });
    }
    d_x[k] = from_f32<T>(accumulate ? to_f32(d_x[k]) + sum : sum);
  }
}

/// A block per element of the weight.
template <class T, class G>
__global__ void depthwise_weight(Depthwise<T> a, G* __restrict__ d_weight, const T* __restrict__ d_out,
                                 const T* __restrict__ x, bool accumulate) {
  const long element = blockIdx.x, o = element / a.taps(), tap = element % a.taps();
  const long positions = a.positions(), outputs = a.channels * a.of_channel;
  double part = 0;
  for (long k = threadIdx.x; k < a.images * positions; k += blockDim.x) {
    const long plane = k / positions * outputs + o, position = k % positions;
    const long at =
        a.p.input(position / a.p.out_w, position % a.p.out_w, tap / a.p.kernel_w, tap % a.p.kernel_w);
    if (at >= 0)
      part += static_cast<double>(to_f32(d_out[plane * positions + position]) *
                                  to_f32(x[plane / a.of_channel * a.plane() + at]));
  }
  const double sum = block_sum(part);
  if (threadIdx.x == 0) store_sum(d_weight + element, sum, accumulate);
}

// ---- products

/// The stream's workspace in three parts: of the BLAS, columns, and sums of a weight in f32.
struct Workspace {
  Workspace(std::size_t columns, std::size_t sums, const Stream& stream) {
    const auto whole = [](std::size_t bytes) { return round_up(bytes, 256); };
    const std::size_t of_blas = whole(kernels::blas().workspace_bytes(stream.device()));
    blas = static_cast<std::byte*>(stream.workspace(of_blas + whole(columns) + sums));
    this->columns = blas + of_blas, this->sums = blas + of_blas + whole(columns);
  }
  std::byte *blas, *columns, *sums;
};

void multiply(kernels::GemmCall call, const Workspace& memory, const Stream& stream) {
  call.allow_tf32 = environment().allow_tf32;
  call.workspace = memory.blas;
  kernels::blas().gemm(call, stream.device(), stream.native());
}

template <class T>
class Products {
 public:
  Products(const ConvSizes& s, const Stream& stream) : s_(s), plane_(s), stream_(stream) {}

  void forward(const Tensor& out, const Tensor& x, const Tensor& weight, const Tensor& bias) const {
    const std::size_t m = s_.group_outputs(), depth = s_.depth(), tile = tile_of();
    const Workspace memory(column_bytes_of(tile), 0, stream_);
    if (bias.defined())
      for (std::size_t n = 0; n < s_.images; ++n)
        cuda::launch("conv2d", fill_rows<T>, cuda::grid_for(s_.outputs * s_.positions()), stream_,
                     out.data<T>() + n * s_.outputs * s_.positions(), bias.data<T>(), long_of(s_.outputs),
                     long_of(s_.positions()));
    each_tile(tile, [&](std::size_t image, std::size_t group, std::size_t begin, std::size_t n) {
      multiply({.m = m,
                .n = n,
                .k = depth,
                .a = weight.data<T>() + group * m * depth,
                .a_stride = depth,
                .b = columns(memory, x, image, begin, n),
                .b_stride = s_.is_product() ? s_.plane() : n,
                .d = out.data<T>() + image * m * s_.positions() + begin,
                .d_stride = s_.positions(),
                .factors = dtype_of<T>,
                .result = dtype_of<T>,
                .beta = bias.defined() ? 1.0f : 0.0f},
               memory, stream_);
    });
  }

  void input(const Tensor& d_x, const Tensor& d_out, const Tensor& weight, Into into) const {
    const std::size_t k = s_.group_outputs(), depth = s_.depth(), channels = s_.group_channels();
    const std::size_t column = s_.taps() * s_.positions() * sizeof(float);
    const std::size_t block = std::clamp<std::size_t>(column_bytes / column, 1, channels);
    const Workspace memory(s_.is_product() ? 0 : block * column, 0, stream_);
    for (std::size_t image = 0; image < s_.images * s_.groups; ++image)
      for (std::size_t c = 0; c < channels; c += s_.is_product() ? channels : block) {
        const std::size_t n = s_.is_product() ? channels : std::min(block, channels - c);
        T* const to = d_x.data<T>() + (image * channels + c) * s_.plane();
        kernels::GemmCall call{.m = n * s_.taps(),
                               .n = s_.positions(),
                               .k = k,
                               .a = weight.data<T>() + image % s_.groups * k * depth + c * s_.taps(),
                               .a_stride = depth,
                               .transpose_a = true,
                               .b = d_out.data<T>() + image * k * s_.positions(),
                               .b_stride = s_.positions(),
                               .d = memory.columns,
                               .d_stride = s_.positions(),
                               .factors = dtype_of<T>,
                               .result = DType::f32};
        if (s_.is_product())
          call.d = to, call.result = dtype_of<T>, call.beta = into == Into::accumulate ? 1.0f : 0.0f;
        multiply(call, memory, stream_);
        if (!s_.is_product())
          cuda::launch("conv2d_backward", gather_columns<T>, cuda::grid_for(n * s_.plane()), stream_, to,
                       reinterpret_cast<const float*>(memory.columns), plane_, long_of(n),
                       into == Into::accumulate);
      }
  }

  void weight(const Tensor& d_weight, const Tensor& d_out, const Tensor& x, Into into) const {
    const std::size_t m = s_.group_outputs(), depth = s_.depth(), tile = tile_of();
    const Workspace memory(column_bytes_of(tile), d_weight.count() * sizeof(float), stream_);
    auto* const sums = reinterpret_cast<float*>(memory.sums);
    each_tile(tile, [&](std::size_t image, std::size_t group, std::size_t begin, std::size_t n) {
      multiply({.m = m,
                .n = depth,
                .k = n,
                .a = d_out.data<T>() + image * m * s_.positions() + begin,
                .a_stride = s_.positions(),
                .b = columns(memory, x, image, begin, n),
                .b_stride = s_.is_product() ? s_.plane() : n,
                .transpose_b = true,
                .d = sums + group * m * depth,
                .d_stride = depth,
                .factors = dtype_of<T>,
                .result = DType::f32,
                .beta = image < s_.groups && begin == 0 ? 0.0f : 1.0f},
               memory, stream_);
    });
    if (s_.images == 0) memset_async(sums, 0, d_weight.count() * sizeof(float), stream_);
    dispatch_gradient_dtype<T>(d_weight.dtype(), [&](auto g) {
      using G = decltype(g);
      cuda::launch("conv2d_backward", store_sums<G>, cuda::grid_for(d_weight.count()), stream_,
                   d_weight.data<G>(), static_cast<const float*>(sums), long_of(d_weight.count()),
                   into == Into::accumulate);
    });
  }

 private:
  static long long_of(std::size_t n) { return static_cast<long>(n); }
  /// Positions of a tile, whole words of 16 bytes.
  std::size_t tile_of() const {
    if (s_.is_product()) return s_.positions();
    const std::size_t tile = std::max<std::size_t>(64, column_bytes / sizeof(T) / s_.depth()) / 8 * 8;
    return std::min(s_.positions(), tile);
  }
  std::size_t column_bytes_of(std::size_t tile) const {
    return s_.is_product() ? 0 : s_.depth() * tile * sizeof(T);
  }
  /// f(image · groups + group, group, begin, number of positions)
  template <class F>
  void each_tile(std::size_t tile, const F& f) const {
    for (std::size_t image = 0; image < s_.images * s_.groups; ++image)
      for (std::size_t begin = 0; begin < s_.positions(); begin += tile)
        f(image, image % s_.groups, begin, std::min(tile, s_.positions() - begin));
  }
  const T* columns(const Workspace& memory, const Tensor& x, std::size_t image, std::size_t begin,
                   std::size_t n) const {
    const T* const in = x.data<T>() + image * s_.group_channels() * s_.plane();
    if (s_.is_product()) return in + begin;
    T* const to = reinterpret_cast<T*>(memory.columns);
    cuda::launch("conv2d", read_columns<T>, cuda::grid_for(s_.depth() * n), stream_, to, in, plane_,
                 long_of(s_.depth()), long_of(begin), long_of(n));
    return to;
  }

  const ConvSizes& s_;
  Plane plane_;
  const Stream& stream_;
};

template <class T>
Depthwise<T> depthwise_of(const ConvSizes& s) {
  return {Plane(s), static_cast<long>(s.images), static_cast<long>(s.channels),
          static_cast<long>(s.group_outputs())};
}

template <class T>
void parameter_gradients(const Tensor& d_weight, const Tensor& d_bias, const Tensor& d_out, const Tensor& x,
                         const ConvSizes& s, Into into, const Stream& stream) {
  const bool accumulate = into == Into::accumulate;
  const unsigned threads = threads_for_row(s.images * s.positions());
  if (d_bias.defined())
    dispatch_gradient_dtype<T>(d_bias.dtype(), [&](auto g) {
      using G = decltype(g);
      cuda::launch("conv2d_backward", bias_gradient<T, G>, {{static_cast<unsigned>(s.outputs)}, {threads}},
                   stream, d_bias.data<G>(), d_out.data<T>(), static_cast<long>(s.images),
                   static_cast<long>(s.outputs), static_cast<long>(s.positions()), accumulate);
    });
  if (!d_weight.defined()) return;
  if (!s.is_depthwise()) return Products<T>(s, stream).weight(d_weight, d_out, x, into);
  dispatch_gradient_dtype<T>(d_weight.dtype(), [&](auto g) {
    using G = decltype(g);
    cuda::launch("conv2d_backward", depthwise_weight<T, G>,
                 {{static_cast<unsigned>(d_weight.count())}, {threads}}, stream, depthwise_of<T>(s),
                 d_weight.data<G>(), d_out.data<T>(), x.data<T>(), accumulate);
  });
}

}  // namespace

void conv2d(const Tensor& out, const Tensor& x, const Tensor& weight, const Tensor& bias,
            const Conv2d& options, const Stream& stream) {
  const ConvSizes s = image::conv_sizes(x.shape(), weight.shape(), options);
  dispatch_dtype(x.dtype(), [&](auto t) {
    using T = decltype(t);
    if (!s.is_depthwise()) return Products<T>(s, stream).forward(out, x, weight, bias);
    cuda::launch("conv2d", depthwise<T>, cuda::grid_for(out.count()), stream, depthwise_of<T>(s),
                 out.data<T>(), x.data<T>(), weight.data<T>(), bias.defined() ? bias.data<T>() : nullptr);
  });
}

void conv2d_backward(const Tensor& d_x, const Tensor& d_weight, const Tensor& d_bias, const Tensor& d_out,
                     const Tensor& x, const Tensor& weight, const Conv2d& options, Into into_x,
                     Into into_parameters, const Stream& stream) {
  const ConvSizes s = image::conv_sizes(x.shape(), weight.shape(), options);
  dispatch_dtype(x.dtype(), [&](auto t) {
    using T = decltype(t);
    parameter_gradients<T>(d_weight, d_bias, d_out, x, s, into_parameters, stream);
    if (!d_x.defined()) return;
    if (!s.is_depthwise()) return Products<T>(s, stream).input(d_x, d_out, weight, into_x);
    cuda::launch("conv2d_backward", depthwise_input<T>, cuda::grid_for(d_x.count()), stream,
                 depthwise_of<T>(s), d_x.data<T>(), d_out.data<T>(), weight.data<T>(),
                 into_x == Into::accumulate);
  });
}

}  // namespace rz::ops::device
