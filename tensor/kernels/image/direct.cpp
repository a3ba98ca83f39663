// Convolutions in f32 with strides of 1, without columns. A task has some rows of an image. Its input is
// copied with its padding, so that the inputs of consecutive positions are consecutive under each tap: also
// across rows, if a row of outputs is as wide as one of padded inputs. The product then reads them where they
// are, at an offset for each term; what it computes between the rows of outputs is dropped.

#include "tensor/kernels/image/conv2d.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tensor/kernels/image/direct.cpp"
#include <hwy/aligned_allocator.h>
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <cstring>
#include <vector>

#include "tensor/kernels/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace rz {
namespace HWY_NAMESPACE {

using ops::image::DirectRows;

/// Three vectors of positions, the first of which is vector v; `in` has the input of their first term.
struct ThreeVectors {
  std::size_t v;
  const float* in[3];
};

/// Adds terms [begin, end) to three vectors of `rows` outputs, whose weights of a term are consecutive.
template <int rows>
HWY_INLINE void direct_block(const DirectRows& a, std::size_t output, const ThreeVectors& at,
                             std::size_t begin, std::size_t end) {
  const Floats d;
  const std::size_t lanes = hn::Lanes(d);
  FloatVector sum[rows][3];
  float* const to = a.sums + output * a.sums_stride + at.v * lanes;
  const auto row = [&](int r) { return to + static_cast<std::size_t>(r) * a.sums_stride; };
#pragma GCC unroll 4
  for (int r = 0; r < rows; ++r)
    if (begin > 0) {
      sum[r][0] = hn::LoadU(d, row(r));
      sum[r][1] = hn::LoadU(d, row(r) + lanes);
      sum[r][2] = hn::LoadU(d, row(r) + 2 * lanes);
    } else {
      sum[r][0] = hn::Set(d, a.bias ? a.bias[output + static_cast<std::size_t>(r)] : 0);
      sum[r][1] = sum[r][2] = sum[r][0];
    }
  const float* weight = a.weight + output * a.depth + begin * rows;
  const float *const in0 = at.in[0], *const in1 = at.in[1], *const in2 = at.in[2];
  for (std::size_t k = begin; k < end; ++k, weight += rows) {
    const std::size_t offset = a.offsets[k];
    const FloatVector x0 = hn::LoadU(d, in0 + offset), x1 = hn::LoadU(d, in1 + offset),
                      x2 = hn::LoadU(d, in2 + offset);
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) {
      const FloatVector w = hn::Set(d, weight[r]);
      sum[r][0] = hn::MulAdd(w, x0, sum[r][0]);
      sum[r][1] = hn::MulAdd(w, x1, sum[r][1]);
      sum[r][2] = hn::MulAdd(w, x2, sum[r][2]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < rows; ++r) {
    hn::StoreU(sum[r][0], d, row(r));
    hn::StoreU(sum[r][1], d, row(r) + lanes);
    hn::StoreU(sum[r][2], d, row(r) + 2 * lanes);
  }
}

/// Vectors run across rows, or each row begins with one, which computes less if its length suits.
void direct_rows(const DirectRows& a) {
  const std::size_t lanes = hn::Lanes(Floats()), per_row = ceil_div(a.out_width, lanes);
  const bool across = a.width <= per_row * lanes;
  const std::size_t row_stride = across ? a.width : per_row * lanes;
  const std::size_t vectors = ceil_div(a.rows * row_stride, lanes);
  const auto input = [&](std::size_t v) {
    v = std::min(v, vectors - 1);
    return a.in + (across ? v * lanes : v / per_row * a.width + v % per_row * lanes);
  };
  constexpr std::size_t terms = 192;  // whose inputs stay in the first-level cache
  for (std::size_t v = 0; v < vectors; v += 3) {
    const ThreeVectors at{v, {input(v), input(v + 1), input(v + 2)}};
    for (std::size_t begin = 0; begin < a.depth; begin += terms) {
      const std::size_t end = std::min(a.depth, begin + terms);
      std::size_t output = 0;
      for (; output + 4 <= a.outputs; output += 4) direct_block<4>(a, output, at, begin, end);
      if (a.outputs - output == 3) direct_block<3>(a, output, at, begin, end);
      if (a.outputs - output == 2) direct_block<2>(a, output, at, begin, end);
      if (a.outputs - output == 1) direct_block<1>(a, output, at, begin, end);
    }
  }
  for (std::size_t output = 0; output < a.outputs; ++output)
    for (std::size_t row = 0; row < a.rows; ++row)
      map_into(
          a.accumulate, a.out + output * a.out_stride + row * a.out_width, a.out_width,
          [](auto x) HWY_ATTR { return x; },
          static_cast<const float*>(a.sums + output * a.sums_stride + row * row_stride));
}

}  // namespace HWY_NAMESPACE
}  // namespace rz
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace rz {

HWY_EXPORT(direct_rows);

namespace ops::image {

namespace {

constexpr std::size_t task_elements = std::size_t{1} << 16;  // of padded inputs
constexpr std::size_t slack = 3 * 64;                        // that vectors may read or store past the end

/// Copies rows of planes with their padding: those of outputs [begin, begin + rows).
void copy_with_padding(float* to, const float* x, const ConvSizes& s, std::size_t begin, std::size_t rows,
                       std::size_t width) {
  for (std::size_t c = 0; c < s.group_channels(); ++c, x += s.plane())
    for (std::size_t row = begin; row < begin + rows; ++row, to += width) {
      if (row < s.y.padding || row >= s.y.padding + s.y.in) {
        std::fill_n(to, width, 0.0f);
        continue;
      }
      std::fill_n(to, s.x.padding, 0.0f);
      std::memcpy(to + s.x.padding, x + (row - s.y.padding) * s.x.in, s.x.in * sizeof(float));
      std::fill_n(to + s.x.padding + s.x.in, s.x.padding, 0.0f);
    }
  std::fill_n(to, slack, 0.0f);
}

/// The weights of all groups, in the order in which blocks of four outputs of a group, and the rest, read
/// them.
template <class F>
hwy::AlignedFreeUniquePtr<float[]> packed_weights(const ConvSizes& s, const F& weight, const Stream& stream) {
  const std::size_t m = s.group_outputs(), depth = s.depth();
  auto packed = hwy::AllocateAligned<float>(s.outputs * depth);
  stream.parallel_for(s.outputs, ceil_div(4096, depth), [&](std::size_t begin, std::size_t end) {
    for (std::size_t output = begin; output < end; ++output) {
      const std::size_t group = output / m, o = output % m, first = o / 4 * 4;
      const std::size_t rows = std::min<std::size_t>(4, m - first);
      float* const to = packed.get() + (output - o + first) * depth + (o - first);
      for (std::size_t c = 0, k = 0; c < s.group_channels(); ++c)
        for (std::size_t tap = 0; tap < s.taps(); ++tap, k += rows) to[k] = weight(group, o, c, tap);
    }
  });
  return packed;
}

template <class F>
void convolve_rows(float* out, const float* x, const float* bias, const ConvSizes& s, const F& weight,
                   Into into, const Stream& stream) {
  const std::size_t m = s.group_outputs(), depth = s.depth(), channels = s.group_channels();
  const std::size_t width = s.x.in + 2 * s.x.padding, reach = s.y.dilation * (s.y.kernel - 1);
  const std::size_t max_rows = std::max<std::size_t>(1, task_elements / (channels * width));
  const std::size_t parts = ceil_div(s.y.out, max_rows > reach ? max_rows - reach : 1),
                    rows = ceil_div(s.y.out, parts);
  const auto packed = packed_weights(s, weight, stream);
  std::vector<std::size_t> offsets(depth);
  for (std::size_t k = 0; k < depth; ++k) {
    const std::size_t tap = k % s.taps();
    offsets[k] = (k / s.taps() * (rows + reach) + tap / s.x.kernel * s.y.dilation) * width +
                 tap % s.x.kernel * s.x.dilation;
  }
  stream.parallel_for(s.images * s.groups * parts, 1, [&](std::size_t first, std::size_t past) {
    const std::size_t sums_stride = rows * round_up(width, std::size_t{64}) + slack;
    const auto padded = hwy::AllocateAligned<float>(channels * (rows + reach) * width + slack);
    const auto sums = hwy::AllocateAligned<float>(m * sums_stride);
    for (std::size_t task = first; task < past; ++task) {
      const std::size_t image = task / parts, group = image % s.groups, begin = task % parts * rows;
      if (begin >= s.y.out) continue;
      copy_with_padding(padded.get(), x + image * channels * s.plane(), s, begin, rows + reach, width);
      HWY_DYNAMIC_DISPATCH(direct_rows)
      ({.in = padded.get(),
        .offsets = offsets.data(),
        .weight = packed.get() + group * m * depth,
        .bias = bias ? bias + group * m : nullptr,
        .sums = sums.get(),
        .out = out + image * m * s.positions() + begin * s.x.out,
        .depth = depth,
        .outputs = m,
        .rows = std::min(rows, s.y.out - begin),
        .width = width,
        .sums_stride = sums_stride,
        .out_stride = s.positions(),
        .out_width = s.x.out,
        .accumulate = into == Into::accumulate});
    }
  });
}

}  // namespace

void direct(float* out, const float* x, const float* weight, const float* bias, const ConvSizes& s,
            const Stream& stream) {
  const std::size_t m = s.group_outputs(), depth = s.depth();
  const auto at = [&](std::size_t group, std::size_t o, std::size_t c, std::size_t tap) {
    return weight[(group * m + o) * depth + c * s.taps() + tap];
  };
  convolve_rows(out, x, bias, s, at, Into::overwrite, stream);
}

void direct_input(float* d_x, const float* d_out, const float* weight, const ConvSizes& s, Into into,
                  const Stream& stream) {
  const std::size_t k = s.group_outputs(), depth = s.depth(), last = s.taps() - 1;
  const auto at = [&](std::size_t group, std::size_t c, std::size_t o, std::size_t tap) {
    return weight[(group * k + o) * depth + c * s.taps() + last - tap];
  };
  convolve_rows(d_x, d_out, nullptr, s.transposed(), at, into, stream);
}

}  // namespace ops::image
}  // namespace rz
#endif
