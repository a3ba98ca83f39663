// Depthwise convolutions, one channel at a time. A plane is copied to f32, with its padding, in an order in
// which the inputs of consecutive outputs are consecutive under each tap: with stride s, the columns 0, s, 2s
// … of a row come first, then 1, s + 1 …

#include "tensor/kernels/image/conv2d.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tensor/kernels/image/depthwise.cpp"
#include <hwy/aligned_allocator.h>
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <vector>

#include "tensor/kernels/image/planes.h"
#include "tensor/kernels/vector-inl.h"

#ifndef RZ_DEPTHWISE_PLANE
#define RZ_DEPTHWISE_PLANE
namespace rz::ops::image {

/// Elements that may be read from the last output on.
constexpr std::size_t max_vector = HWY_ARCH_X86 ? 16 : 64;

/// A plane in f32 with its padding. Column c of a row is element (c % stride) · length + c / stride of it.
struct PaddedPlane {
  explicit PaddedPlane(const ConvSizes& s) : y(s.y), x(s.x) {
    rows = (y.out - 1) * y.stride + (y.kernel - 1) * y.dilation + 1;
    length = x.out + (x.kernel - 1) * x.dilation / x.stride + max_vector;
    row = length * x.stride;
    for (std::size_t i = 0; i < y.kernel; ++i)
      for (std::size_t j = 0; j < x.kernel; ++j) {
        const std::size_t column = j * x.dilation;
        taps.push_back(i * y.dilation * row + column % x.stride * length + column / x.stride);
      }
  }
  std::size_t elements() const { return rows * row; }
  /// From a row of outputs to the next one.
  std::size_t next() const { return y.stride * row; }
  /// Columns of x that are elements of part q: those from `first` on, at elements [begin, end).
  struct Part {
    std::size_t begin, end, first;
  };
  Part part(std::size_t q) const {
    const std::size_t begin = x.padding > q ? ceil_div(x.padding - q, x.stride) : 0;
    const std::size_t end = x.in + x.padding > q ? ceil_div(x.in + x.padding - q, x.stride) : 0;
    const std::size_t within = std::min(end, length);
    return {std::min(begin, within), within, begin * x.stride + q - x.padding};
  }

  ConvAxis y, x;
  std::size_t rows, length, row;
  std::vector<std::size_t> taps;  ///< elements from the first output's place to its input under each tap
};

}  // namespace rz::ops::image
#endif

HWY_BEFORE_NAMESPACE();
namespace rz {
namespace HWY_NAMESPACE {

using ops::image::PaddedPlane;

template <class T>
void copy_padded_row(float* to, const T* x, const PaddedPlane& p) {
  std::fill_n(to, p.row, 0.0f);
  for (std::size_t q = 0; q < p.x.stride; ++q, to += p.length) {
    const auto part = p.part(q);
    if (part.begin == part.end) continue;
    const T* const from = x + part.first;
    if (p.x.stride == 1)
      map(
          to + part.begin, part.end - part.begin, [](auto v) HWY_ATTR { return v; }, from);
    else
      for (std::size_t k = 0; k < part.end - part.begin; ++k)
        to[part.begin + k] = to_f32(from[k * p.x.stride]);
  }
}

void copy_padded(float* to, const Tensor& x, std::size_t at, const PaddedPlane& p) {
  ops::dispatch_dtype(x.dtype(), [&](auto t) HWY_ATTR {
    const auto* const plane = elements<const decltype(t)>(x) + at;
    for (std::size_t r = 0; r < p.rows; ++r)
      if (r < p.y.padding || r - p.y.padding >= p.y.in)
        std::fill_n(to + r * p.row, p.row, 0.0f);
      else
        copy_padded_row(to + r * p.row, plane + (r - p.y.padding) * p.x.in, p);
  });
}

/// The gradient of a plane from that of the padded one; `row` has room for a row of x.
void store_padded(const Tensor& d_x, std::size_t at, const float* from, const PaddedPlane& p, float* row,
                  bool accumulate) {
  ops::dispatch_dtype(d_x.dtype(), [&](auto t) HWY_ATTR {
    auto* const plane = elements<decltype(t)>(d_x) + at;
    for (std::size_t r = 0; r < p.y.in; ++r) {
      std::fill_n(row, p.x.in, 0.0f);
      if (r + p.y.padding < p.rows)
        for (std::size_t q = 0; q < p.x.stride; ++q) {
          const float* const in = from + (r + p.y.padding) * p.row + q * p.length;
          const auto part = p.part(q);
          for (std::size_t k = part.begin; k < part.end; ++k)
            row[part.first + (k - part.begin) * p.x.stride] = in[k];
        }
      map_into(
          accumulate, plane + r * p.x.in, p.x.in, [](auto v) HWY_ATTR { return v; },
          static_cast<const float*>(row));
    }
  });
}

/// k vectors of outputs, the last of which may exceed the n that are left. Returns the number of outputs.
template <int k, class T>
HWY_INLINE std::size_t store_outputs(T* out, std::size_t n, const float* in, const float* weight, float bias,
                                     const PaddedPlane& p) {
  const Floats d;
  const std::size_t lanes = hn::Lanes(d), taps = p.taps.size();
  const std::size_t* const places = p.taps.data();
  FloatVector sums[k];
  for (auto& sum : sums) sum = hn::Set(d, bias);
  for (std::size_t tap = 0; tap < taps; ++tap) {
    const FloatVector w = hn::Set(d, weight[tap]);
    const float* const from = in + places[tap];
    for (std::size_t v = 0; v < k; ++v) sums[v] = hn::MulAdd(w, hn::LoadU(d, from + v * lanes), sums[v]);
  }
  for (std::size_t v = 0; v < k - 1; ++v) store(sums[v], d, out + v * lanes);
  const std::size_t last = (k - 1) * lanes;
  if (n < last + lanes) {
    store_part(sums[k - 1], d, out + last, n - last);
    return n;
  }
  store(sums[k - 1], d, out + last);
  return last + lanes;
}

void convolve_padded(const Tensor& out, std::size_t at, const float* padded, const float* weight, float bias,
                     const PaddedPlane& p) {
  ops::dispatch_dtype(out.dtype(), [&](auto t) HWY_ATTR {
    const std::size_t lanes = hn::Lanes(Floats()), n = p.x.out;
    auto* to = elements<decltype(t)>(out) + at;
    for (std::size_t y = 0; y < p.y.out; ++y, to += n, padded += p.next()) {
      for (std::size_t i = 0; i < n;) {
        const std::size_t vectors = ceil_div(n - i, lanes);
        i += vectors >= 4   ? store_outputs<4>(to + i, n - i, padded + i, weight, bias, p)
             : vectors >= 2 ? store_outputs<2>(to + i, n - i, padded + i, weight, bias, p)
                            : store_outputs<1>(to + i, n - i, padded + i, weight, bias, p);
      }
    }
  });
}

/// Adds d_out · weight to the gradient of a padded plane.
void spread_padded(float* padded, const float* d_out, const float* weight, const PaddedPlane& p) {
  const Floats d;
  const std::size_t lanes = hn::Lanes(d), n = p.x.out;
  for (std::size_t y = 0; y < p.y.out; ++y, d_out += n, padded += p.next())
    for (std::size_t tap = 0; tap < p.taps.size(); ++tap) {
      const FloatVector w = hn::Set(d, weight[tap]);
      float* const to = padded + p.taps[tap];
      std::size_t i = 0;
      for (; i + lanes <= n; i += lanes)
        hn::StoreU(hn::MulAdd(w, hn::LoadU(d, d_out + i), hn::LoadU(d, to + i)), d, to + i);
      for (; i < n; ++i) to[i] += weight[tap] * d_out[i];
    }
}

/// Correlates k taps at once, whose sums do not wait for each other.
template <int k>
HWY_INLINE void correlate_taps(double* sums, const float* d_out, const float* padded, const std::size_t* taps,
                               const PaddedPlane& p) {
  const Floats d;
  const std::size_t lanes = hn::Lanes(d), n = p.x.out, whole = n / lanes * lanes;
  const auto rest = hn::FirstN(d, n - whole);
  FloatVector sum[k];
  for (auto& s : sum) s = hn::Zero(d);
  for (std::size_t y = 0; y < p.y.out; ++y, d_out += n, padded += p.next()) {
    for (std::size_t i = 0; i < whole; i += lanes) {
      const FloatVector g = hn::LoadU(d, d_out + i);
      for (int t = 0; t < k; ++t) sum[t] = hn::MulAdd(g, hn::LoadU(d, padded + taps[t] + i), sum[t]);
    }
    if (whole == n) continue;
    const FloatVector g = hn::MaskedLoad(rest, d, d_out + whole);
    for (int t = 0; t < k; ++t)
      sum[t] = hn::MulAdd(g, hn::IfThenElseZero(rest, hn::LoadU(d, padded + taps[t] + whole)), sum[t]);
  }
  for (int t = 0; t < k; ++t) sums[t] += static_cast<double>(hn::GetLane(hn::SumOfLanes(d, sum[t])));
}

/// sums[tap] += Σ d_out · x, where x is a padded plane.
void correlate_padded(double* sums, const float* d_out, const float* padded, const PaddedPlane& p) {
  std::size_t tap = 0;
  for (; tap + 4 <= p.taps.size(); tap += 4)
    correlate_taps<4>(sums + tap, d_out, padded, p.taps.data() + tap, p);
  for (; tap < p.taps.size(); ++tap) correlate_taps<1>(sums + tap, d_out, padded, p.taps.data() + tap, p);
}

}  // namespace HWY_NAMESPACE
}  // namespace rz
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace rz {

HWY_EXPORT(copy_padded);
HWY_EXPORT(store_padded);
HWY_EXPORT(convolve_padded);
HWY_EXPORT(spread_padded);
HWY_EXPORT(correlate_padded);

namespace ops::image {

namespace {

using Memory = hwy::AlignedFreeUniquePtr<float[]>;

Memory memory_of(std::size_t elements) {
  return hwy::AllocateAligned<float>(std::max<std::size_t>(1, elements));
}

Memory widened(const Tensor& t) {
  Memory values = memory_of(t.count());
  load_floats(values.get(), t, 0, t.count());
  return values;
}

}  // namespace

void depthwise(const Tensor& out, const Tensor& x, const Tensor& weight, const Tensor& bias,
               const ConvSizes& s, const Stream& stream) {
  const PaddedPlane p(s);
  const Memory w = widened(weight), b = bias.defined() ? widened(bias) : memory_of(0);
  const std::size_t of_channel = s.group_outputs();
  stream.parallel_for(s.images * s.channels, 1, [&](std::size_t begin, std::size_t end) {
    const Memory padded = memory_of(p.elements());
    for (std::size_t plane = begin; plane < end; ++plane) {
      HWY_DYNAMIC_DISPATCH(copy_padded)(padded.get(), x, plane * s.plane(), p);
      for (std::size_t k = 0; k < of_channel; ++k) {
        const std::size_t o = plane % s.channels * of_channel + k;
        HWY_DYNAMIC_DISPATCH(convolve_padded)
        (out, (plane * of_channel + k) * s.positions(), padded.get(), w.get() + o * s.taps(),
         bias.defined() ? b[o] : 0, p);
      }
    }
  });
}

namespace {

/// The axis of the convolution that d_x is: of d_out with the reversed kernel.
ConvAxis reversed(const ConvAxis& a) {
  return {a.out, a.kernel, a.in, 1, (a.kernel - 1) * a.dilation - a.padding, a.dilation};
}
bool is_reversible(const ConvAxis& a) { return a.stride == 1 && a.padding <= (a.kernel - 1) * a.dilation; }

void convolve_reversed(const Tensor& d_x, const Tensor& d_out, const Tensor& weight, const ConvSizes& s,
                       Into into, const Stream& stream) {
  const PaddedPlane p({s.images, s.channels, s.channels, s.groups, reversed(s.y), reversed(s.x)});
  const Memory w = widened(weight);
  for (std::size_t c = 0; c < s.channels; ++c)
    std::reverse(w.get() + c * s.taps(), w.get() + (c + 1) * s.taps());
  stream.parallel_for(s.images * s.channels, 1, [&](std::size_t begin, std::size_t end) {
    const Memory padded = memory_of(p.elements()), sums = memory_of(s.plane());
    const Tensor to = Tensor::borrow(sums.get(), {s.plane()});
    for (std::size_t plane = begin; plane < end; ++plane) {
      HWY_DYNAMIC_DISPATCH(copy_padded)(padded.get(), d_out, plane * s.positions(), p);
      HWY_DYNAMIC_DISPATCH(convolve_padded)
      (to, 0, padded.get(), w.get() + plane % s.channels * s.taps(), 0, p);
      store_floats(d_x, plane * s.plane(), sums.get(), s.plane(), into);
    }
  });
}

}  // namespace

void depthwise_input(const Tensor& d_x, const Tensor& d_out, const Tensor& weight, const ConvSizes& s,
                     Into into, const Stream& stream) {
  if (s.group_outputs() == 1 && is_reversible(s.y) && is_reversible(s.x))
    return convolve_reversed(d_x, d_out, weight, s, into, stream);
  const PaddedPlane p(s);
  const Memory w = widened(weight);
  const std::size_t of_channel = s.group_outputs(), positions = s.positions();
  stream.parallel_for(s.images * s.channels, 1, [&](std::size_t begin, std::size_t end) {
    const Memory padded = memory_of(p.elements()), gradient = memory_of(positions), row = memory_of(s.x.in);
    for (std::size_t plane = begin; plane < end; ++plane) {
      std::fill_n(padded.get(), p.elements(), 0.0f);
      for (std::size_t k = 0; k < of_channel; ++k) {
        const std::size_t o = plane % s.channels * of_channel + k;
        load_floats(gradient.get(), d_out, (plane * of_channel + k) * positions, positions);
        HWY_DYNAMIC_DISPATCH(spread_padded)(padded.get(), gradient.get(), w.get() + o * s.taps(), p);
      }
      HWY_DYNAMIC_DISPATCH(store_padded)
      (d_x, plane * s.plane(), padded.get(), p, row.get(), into == Into::accumulate);
    }
  });
}

void depthwise_weight(const Tensor& d_weight, const Tensor& d_out, const Tensor& x, const ConvSizes& s,
                      Into into, const Stream& stream) {
  const PaddedPlane p(s);
  const std::size_t of_channel = s.group_outputs(), positions = s.positions(), taps = s.taps();
  stream.parallel_for(s.channels, 1, [&](std::size_t begin, std::size_t end) {
    const Memory padded = memory_of(p.elements()), gradient = memory_of(positions);
    std::vector<double> sums(of_channel * taps);
    for (std::size_t c = begin; c < end; ++c) {
      std::fill(sums.begin(), sums.end(), 0.0);
      for (std::size_t n = 0; n < s.images; ++n) {
        const std::size_t plane = n * s.channels + c;
        HWY_DYNAMIC_DISPATCH(copy_padded)(padded.get(), x, plane * s.plane(), p);
        for (std::size_t k = 0; k < of_channel; ++k) {
          load_floats(gradient.get(), d_out, (plane * of_channel + k) * positions, positions);
          HWY_DYNAMIC_DISPATCH(correlate_padded)
          (sums.data() + k * taps, gradient.get(), padded.get(), p);
        }
      }
      for (std::size_t i = 0; i < sums.size(); ++i)
        store_number(d_weight, c * of_channel * taps + i, sums[i], into);
    }
  });
}

}  // namespace ops::image
}  // namespace rz
#endif
