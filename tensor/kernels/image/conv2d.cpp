// Convolutions as products with columns (im2col), of one tile of positions at a time, whose columns fit into
// a core's cache. Each part of the work has extents that depend on the shapes only, and its own product on
// one thread: so the bits do not depend on the number of threads. In f32 with strides of 1 forward and d_x
// need no columns (direct.cpp).
//
// Forward: a task is a tile of an image. d_x: a task is a block of channels of an image; the gradients of its
// columns are added to its planes, tile by tile. d_weight: a task is a block of channels, for a part of the
// tiles of all images; the parts' sums are added in order.

#include "tensor/kernels/image/conv2d.h"

#include <hwy/aligned_allocator.h>

#include <cstdint>
#include <type_traits>

#include "tensor/kernels/check.h"
#include "tensor/kernels/device_ops.h"
#include "tensor/kernels/dtype_dispatch.h"
#include "tensor/kernels/image/planes.h"
#include "tensor/kernels/linear_algebra/gemm.h"
#include "tensor/kernels/linear_algebra/gemm_16bit.h"

namespace rz::ops {

namespace image {

namespace {

/// "1", or "1 x 2".
std::string text(Size2 s) { return s.h == s.w ? concat(s.h) : concat(s.h, " x ", s.w); }

std::string described(const Conv2d& o) {
  return concat("stride ", text(o.stride), ", padding ", text(o.padding), ", dilation ", text(o.dilation),
                ", groups ", o.groups);
}

/// The number of outputs of an axis; 0 if the kernel exceeds the padded image.
std::size_t outputs(std::size_t in, std::size_t kernel, std::size_t stride, std::size_t padding,
                    std::size_t dilation) {
  const std::size_t reach = dilation * (kernel - 1) + 1, padded = in + 2 * padding;
  return padded < reach ? 0 : (padded - reach) / stride + 1;
}

constexpr std::size_t tile_elements = std::size_t{1} << 17;  // of columns
constexpr std::size_t block_depth = 192;                     // rows of columns in a block of channels

/// Positions of a tile with columns of `depth` elements.
std::size_t tile_of(const ConvSizes& s, std::size_t depth) {
  const std::size_t tile = std::max<std::size_t>(64, tile_elements / std::max<std::size_t>(1, depth));
  return std::min(s.positions(), tile / 16 * 16);
}

/// Channels of a block.
std::size_t block_of(const ConvSizes& s) {
  const std::size_t blocks = std::max<std::size_t>(1, s.depth() / block_depth);
  return ceil_div(s.group_channels(), blocks);
}

template <class T>
struct Factor {
  const T* data;
  std::size_t stride;
  bool transposed = false;
};

/// c[m, n] = a · b, or added to c, on this thread.
template <class C, class T>
void multiply(C* c, std::size_t stride, std::size_t m, std::size_t n, std::size_t k, const Factor<T>& a,
              const Factor<T>& b, bool accumulate) {
  if constexpr (std::is_same_v<T, float>) {
    kernels::gemm(c, stride, m, n, k, 1, {a.data, a.stride, a.transposed}, {b.data, b.stride, b.transposed},
                  accumulate ? 1 : 0);
  } else {
    const auto bits = [](const T* p) { return reinterpret_cast<const std::uint16_t*>(p); };
    kernels::gemm_16bit({.m = m,
                         .n = n,
                         .k = k,
                         .factors = dtype_of<T>,
                         .a = {bits(a.data), a.stride, a.transposed},
                         .b = {bits(b.data), b.stride, b.transposed},
                         .c = c,
                         .result = dtype_of<C>,
                         .c_stride = stride,
                         .accumulate = accumulate},
                        Stream());
  }
}

/// Columns [begin, end) of block `first` of `count` channels of a group: those of x itself, or read.
template <class T>
Factor<T> columns(T* memory, const T* x, std::size_t first, std::size_t count, const ConvSizes& s,
                  std::size_t begin, std::size_t end) {
  const T* const planes = x + first * s.plane();
  if (s.is_product()) return {planes + begin, s.plane()};
  read_columns(memory, end - begin, planes, count, s, begin, end);
  return {memory, end - begin};
}

template <class T>
void convolve(const Tensor& out, const Tensor& x, const Tensor& weight, const Tensor& bias,
              const ConvSizes& s, const Stream& stream) {
  const std::size_t depth = s.depth(), tile = tile_of(s, depth), positions = s.positions();
  const std::size_t tiles = ceil_div(positions, tile), m = s.group_outputs(), channels = s.group_channels();
  stream.parallel_for(s.images * s.groups * tiles, 1, [&](std::size_t first, std::size_t past) {
    const auto memory = hwy::AllocateAligned<T>(s.is_product() ? 1 : depth * tile);
    for (std::size_t task = first; task < past; ++task) {
      const std::size_t image = task / tiles, group = image % s.groups;
      const std::size_t begin = task % tiles * tile, end = std::min(positions, begin + tile);
      T* const to = out.data<T>() + image * m * positions + begin;
      if (bias.defined())
        for (std::size_t o = 0; o < m; ++o)
          std::fill_n(to + o * positions, end - begin, bias.data<T>()[group * m + o]);
      const Factor<T> w{weight.data<T>() + group * m * depth, depth};
      const auto b =
          columns(memory.get(), x.data<T>() + image * channels * s.plane(), 0, channels, s, begin, end);
      multiply(to, positions, m, end - begin, depth, w, b, bias.defined());
    }
  });
}

/// d_x of a convolution that is a product.
template <class T>
void product_input(const Tensor& d_x, const Tensor& d_out, const Tensor& weight, const ConvSizes& s,
                   Into into, const Stream& stream) {
  const std::size_t positions = s.positions(), m = s.group_channels(), k = s.group_outputs();
  const std::size_t tile = tile_of(s, k), tiles = ceil_div(positions, tile);
  stream.parallel_for(s.images * s.groups * tiles, 1, [&](std::size_t first, std::size_t past) {
    for (std::size_t task = first; task < past; ++task) {
      const std::size_t image = task / tiles, group = image % s.groups;
      const std::size_t begin = task % tiles * tile, end = std::min(positions, begin + tile);
      multiply(d_x.data<T>() + image * m * positions + begin, positions, m, end - begin, k,
               Factor<T>{weight.data<T>() + group * k * m, m, true},
               Factor<T>{d_out.data<T>() + image * k * positions + begin, positions},
               into == Into::accumulate);
    }
  });
}

template <class T>
void convolve_input(const Tensor& d_x, const Tensor& d_out, const Tensor& weight, const ConvSizes& s,
                    Into into, const Stream& stream) {
  if (s.is_product()) return product_input<T>(d_x, d_out, weight, s, into, stream);
  if constexpr (std::is_same_v<T, float>)
    if (s.is_direct())
      return direct_input(d_x.data<float>(), d_out.data<float>(), weight.data<float>(), s, into, stream);
  const std::size_t positions = s.positions(), depth = s.depth(), k = s.group_outputs();
  const std::size_t channels = s.group_channels(), block = block_of(s), blocks = ceil_div(channels, block);
  const std::size_t tile = tile_of(s, block * s.taps());
  stream.parallel_for(s.images * s.groups * blocks, 1, [&](std::size_t first, std::size_t past) {
    const auto gradients = hwy::AllocateAligned<float>(block * s.taps() * tile);
    const auto planes = hwy::AllocateAligned<float>(block * s.plane());
    for (std::size_t task = first; task < past; ++task) {
      const std::size_t image = task / blocks, group = image % s.groups;
      const std::size_t c = task % blocks * block, count = std::min(block, channels - c);
      std::fill_n(planes.get(), count * s.plane(), 0.0f);
      const Factor<T> w{weight.data<T>() + group * k * depth + c * s.taps(), depth, true};
      for (std::size_t begin = 0; begin < positions; begin += tile) {
        const std::size_t n = std::min(tile, positions - begin);
        multiply(gradients.get(), n, count * s.taps(), n, k, w,
                 Factor<T>{d_out.data<T>() + image * k * positions + begin, positions}, false);
        add_columns(planes.get(), gradients.get(), n, count, s, begin, begin + n);
      }
      store_floats(d_x, (image * channels + c) * s.plane(), planes.get(), count * s.plane(), into);
    }
  });
}

template <class T>
void convolve_weight(const Tensor& d_weight, const Tensor& d_out, const Tensor& x, const ConvSizes& s,
                     Into into, const Stream& stream) {
  const std::size_t positions = s.positions(), depth = s.depth(), m = s.group_outputs();
  const std::size_t channels = s.group_channels(), block = block_of(s), blocks = ceil_div(channels, block);
  const std::size_t tile = tile_of(s, block * s.taps()), tiles = ceil_div(positions, tile);
  const std::size_t units = s.images * tiles, count = s.outputs * depth;
  // Enough tasks for many threads, but few parts where they are large.
  const std::size_t parts =
      std::clamp<std::size_t>(ceil_div(16, s.groups * blocks), 1, std::max<std::size_t>(1, units));
  const auto sums = hwy::AllocateAligned<float>(parts * count);
  if (units == 0) std::fill_n(sums.get(), count, 0.0f);
  stream.parallel_for(parts * s.groups * blocks, 1, [&](std::size_t first, std::size_t past) {
    const auto memory = hwy::AllocateAligned<T>(s.is_product() ? 1 : block * s.taps() * tile);
    for (std::size_t task = first; task < past; ++task) {
      const std::size_t part = task / blocks / s.groups, group = task / blocks % s.groups;
      const std::size_t c = task % blocks * block, n = std::min(block, channels - c);
      float* const to = sums.get() + part * count + group * m * depth + c * s.taps();
      const std::size_t from = units * part / parts, until = units * (part + 1) / parts;
      for (std::size_t unit = from; unit < until; ++unit) {
        const std::size_t image = unit / tiles * s.groups + group;
        const std::size_t begin = unit % tiles * tile, end = std::min(positions, begin + tile);
        auto b = columns(memory.get(), x.data<T>() + image * channels * s.plane(), c, n, s, begin, end);
        b.transposed = true;
        multiply(to, depth, m, n * s.taps(), end - begin,
                 Factor<T>{d_out.data<T>() + image * m * positions + begin, positions}, b, unit > from);
      }
    }
  });
  stream.parallel_for(count, 1024, [&](std::size_t begin, std::size_t end) {
    for (std::size_t part = 1; part < parts; ++part)
      add_floats(sums.get() + begin, sums.get() + part * count + begin, end - begin);
    store_floats(d_weight, begin, sums.get() + begin, end - begin, into);
  });
}

void bias_gradient(const Tensor& d_bias, const Tensor& d_out, const ConvSizes& s, Into into,
                   const Stream& stream) {
  stream.parallel_for(s.outputs, 1, [&](std::size_t begin, std::size_t end) {
    for (std::size_t o = begin; o < end; ++o) {
      double sum = 0;
      for (std::size_t n = 0; n < s.images; ++n)
        sum += sum_elements(d_out, (n * s.outputs + o) * s.positions(), s.positions());
      store_number(d_bias, o, sum, into);
    }
  });
}

}  // namespace

ConvSizes conv_sizes(const Shape& x, const Shape& weight, const Conv2d& o) {
  const auto refuse = [&](const char* why) {
    fail(Errc::invalid_argument, "conv2d: ", why, ": x ", name(x), ", weight ", name(weight), ", ",
         described(o));
  };
  if (x.dims() != 4 || weight.dims() != 4) refuse("images and weights have four extents");
  if (o.stride.h == 0 || o.stride.w == 0 || o.dilation.h == 0 || o.dilation.w == 0)
    refuse("stride and dilation are at least 1");
  if (o.groups == 0 || x[1] % o.groups != 0 || weight[0] % o.groups != 0 || weight[1] * o.groups != x[1])
    refuse("the channels do not fit the weight and the groups");
  const std::size_t kh = weight[2], kw = weight[3];
  if (kh == 0 || kw == 0) refuse("the kernel is empty");
  const ConvSizes s{x[0],
                    x[1],
                    weight[0],
                    o.groups,
                    {x[2], kh, outputs(x[2], kh, o.stride.h, o.padding.h, o.dilation.h), o.stride.h,
                     o.padding.h, o.dilation.h},
                    {x[3], kw, outputs(x[3], kw, o.stride.w, o.padding.w, o.dilation.w), o.stride.w,
                     o.padding.w, o.dilation.w}};
  if (s.positions() == 0) refuse("the kernel is larger than the padded image");
  return s;
}

}  // namespace image

Shape conv2d_shape(const Shape& x, const Shape& weight, const Conv2d& options) {
  const auto s = image::conv_sizes(x, weight, options);
  return {s.images, s.outputs, s.y.out, s.x.out};
}

void conv2d(const Tensor& out, const Tensor& x, const Tensor& weight, const Tensor& bias,
            const Conv2d& options, const Stream& stream) {
  const auto s = image::conv_sizes(x.shape(), weight.shape(), options);
  const bool fits =
      out.shape() == Shape{s.images, s.outputs, s.y.out, s.x.out} && optional_vector(bias, s.outputs);
  if (bias.defined())
    check("conv2d", {{"out", out}, {"x", x}, {"weight", weight}, {"bias", bias}}, fits);
  else
    check("conv2d", {{"out", out}, {"x", x}, {"weight", weight}}, fits);
  check_dtype("conv2d", x.dtype(), {{"out", out}, {"weight", weight}, {"bias", bias}});
  if (const auto* d = on_device("conv2d", out, stream))
    return d->conv2d(out, x, weight, bias, options, stream);
  if (s.is_depthwise()) return image::depthwise(out, x, weight, bias, s, stream);
  if (x.dtype() == DType::f32 && s.is_direct())
    return image::direct(out.data<float>(), x.data<float>(), weight.data<float>(),
                         bias.defined() ? bias.data<float>() : nullptr, s, stream);
  dispatch_dtype(x.dtype(), [&](auto t) { image::convolve<decltype(t)>(out, x, weight, bias, s, stream); });
}

void conv2d_backward(const Tensor& d_x, const Tensor& d_weight, const Tensor& d_bias, const Tensor& d_out,
                     const Tensor& x, const Tensor& weight, const Conv2d& options, Into into_x,
                     Into into_parameters, const Stream& stream) {
  constexpr const char* op = "conv2d_backward";
  const auto s = image::conv_sizes(x.shape(), weight.shape(), options);
  check(op, {{"d_out", d_out}, {"x", x}, {"weight", weight}},
        d_out.shape() == Shape{s.images, s.outputs, s.y.out, s.x.out});
  if (d_x.defined()) check(op, {{"d_x", d_x}, {"x", x}}, d_x.shape() == x.shape());
  if (d_weight.defined())
    check(op, {{"d_weight", d_weight}, {"weight", weight}}, d_weight.shape() == weight.shape());
  if (d_bias.defined()) check(op, {{"d_bias", d_bias}, {"d_out", d_out}}, is_vector(d_bias, s.outputs));
  check_dtype(op, x.dtype(), {{"d_out", d_out}, {"weight", weight}, {"d_x", d_x}});
  check_gradient_dtype(op, x.dtype(), {{"d_weight", d_weight}, {"d_bias", d_bias}});
  if (const auto* d = on_device(op, d_out, stream))
    return d->conv2d_backward(d_x, d_weight, d_bias, d_out, x, weight, options, into_x, into_parameters,
                              stream);
  if (d_bias.defined()) image::bias_gradient(d_bias, d_out, s, into_parameters, stream);
  if (s.is_depthwise()) {
    if (d_weight.defined()) image::depthwise_weight(d_weight, d_out, x, s, into_parameters, stream);
    if (d_x.defined()) image::depthwise_input(d_x, d_out, weight, s, into_x, stream);
    return;
  }
  dispatch_dtype(x.dtype(), [&](auto t) {
    using T = decltype(t);
    if (d_weight.defined()) image::convolve_weight<T>(d_weight, d_out, x, s, into_parameters, stream);
    if (d_x.defined()) image::convolve_input<T>(d_x, d_out, weight, s, into_x, stream);
  });
}

}  // namespace rz::ops
