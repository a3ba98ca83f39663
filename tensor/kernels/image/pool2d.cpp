// Pooling, a row of windows at a time: first over the rows of the windows, whole vectors of columns, then
// over the columns of each window. A task is some planes.

#include "tensor/kernels/image/pool2d.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tensor/kernels/image/pool2d.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <cstdint>
#include <vector>

#include "tensor/kernels/check.h"
#include "tensor/kernels/device_ops.h"
#include "tensor/kernels/image/planes.h"
#include "tensor/kernels/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace rz {
namespace HWY_NAMESPACE {

/// The largest element of each column of rows [begin, end) of a plane, and its row.
void largest_of_columns(float* largest, std::int32_t* rows, const Tensor& x, std::size_t at,
                        std::size_t width, long begin, long end) {
  const Floats d;
  const hn::RebindToSigned<Floats> di;
  const std::size_t lanes = hn::Lanes(d);
  ops::dispatch_dtype(x.dtype(), [&](auto t) HWY_ATTR {
    const auto* const plane = elements<const decltype(t)>(x) + at;
    for (std::size_t i = 0; i < width; i += lanes) {
      FloatVector max = hn::Set(d, -std::numeric_limits<float>::infinity());
      auto row = hn::Set(di, static_cast<std::int32_t>(begin));
      for (long r = begin; r < end; ++r) {
        const auto* const from = plane + static_cast<std::size_t>(r) * width + i;
        const FloatVector v = i + lanes <= width ? load(d, from) : load_part(d, from, width - i, 0.0f);
        const auto replaces = hn::Or(hn::Gt(v, max), hn::IsNaN(v));
        max = hn::IfThenElse(replaces, v, max);
        row = hn::IfThenElse(hn::RebindMask(di, replaces), hn::Set(di, static_cast<std::int32_t>(r)), row);
      }
      hn::StoreU(max, d, largest + i);  // both have room for a vector more
      hn::StoreU(row, di, rows + i);
    }
  });
}

/// sums[i] = Σ of column i of rows [begin, end) of a plane.
void sums_of_columns(double* sums, const Tensor& x, std::size_t at, std::size_t width, long begin, long end) {
  std::fill_n(sums, width, 0.0);
  ops::dispatch_dtype(x.dtype(), [&](auto t) HWY_ATTR {
    const auto* const plane = elements<const decltype(t)>(x) + at;
    for (long r = begin; r < end; ++r)
      add_to_sums(
          sums, width, [](auto v) HWY_ATTR { return v; }, plane + static_cast<std::size_t>(r) * width);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace rz
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace rz {

HWY_EXPORT(largest_of_columns);
HWY_EXPORT(sums_of_columns);

namespace ops {

namespace image {

namespace {

constexpr std::size_t room = 64;  // elements of the longest vector

std::size_t count(long n) { return static_cast<std::size_t>(n); }
long number(std::size_t n) { return static_cast<long>(n); }

/// Planes that a thread takes at least: some 4096 elements.
std::size_t planes_of_thread(const PoolSizes& s) {
  return std::max<std::size_t>(1, 4096 / std::max<std::size_t>(1, count(s.plane())));
}

/// Calls f(plane) for all planes, with memory(f32 elements).
template <class F>
void each_plane(const PoolSizes& s, const Stream& stream, const F& f) {
  stream.parallel_for(count(s.planes), planes_of_thread(s), f);
}

std::string text(const Pool2d& p, Size2 stride) {
  return concat("kernel ", p.kernel.h, " x ", p.kernel.w, ", stride ", stride.h, " x ", stride.w,
                ", padding ", p.padding.h, " x ", p.padding.w);
}

/// The largest element of one window from those of its columns. Columns are compared as if all elements were,
/// row by row.
struct Largest {
  float value = -std::numeric_limits<float>::infinity();
  std::int32_t row = 0, column = 0;

  /// c exceeds the column so far.
  void add(float v, std::int32_t r, std::int32_t c) {
    const bool nan = v != v, nan_before = value != value, later = r >= row;
    if (nan ? !nan_before || later : !nan_before && (v > value || (v == value && !later)))
      value = v, row = r, column = c;
  }
};

void max_pool_row(float* out, std::int32_t* indices, const float* largest, const std::int32_t* rows,
                  const PoolAxis& x) {
  for (long i = 0; i < x.out; ++i) {
    const long begin = x.begin(i), end = x.end(i);
    Largest max{largest[begin], rows[begin], static_cast<std::int32_t>(begin)};
    for (long c = begin + 1; c < end; ++c) max.add(largest[c], rows[c], static_cast<std::int32_t>(c));
    out[i] = max.value;
    indices[i] = static_cast<std::int32_t>(max.row * x.in + max.column);
  }
}

void mean_pool(const Tensor& out, const Tensor& x, const PoolSizes& s, const Stream& stream) {
  each_plane(s, stream, [&](std::size_t first, std::size_t past) {
    std::vector<double> sums(count(s.x.in) + room);
    std::vector<float> row(count(s.x.out));
    for (std::size_t plane = first; plane < past; ++plane)
      for (long y = 0; y < s.y.out; ++y) {
        HWY_DYNAMIC_DISPATCH(sums_of_columns)
        (sums.data(), x, plane * count(s.plane()), count(s.x.in), s.y.begin(y), s.y.end(y));
        for (long i = 0; i < s.x.out; ++i) {
          double sum = 0;
          for (long c = s.x.begin(i); c < s.x.end(i); ++c) sum += sums[count(c)];
          row[count(i)] = static_cast<float>(sum / static_cast<double>(s.y.terms(y) * s.x.terms(i)));
        }
        image::store_floats(out, plane * count(s.positions()) + count(y * s.x.out), row.data(), row.size(),
                            Into::overwrite);
      }
  });
}

/// A row of d_x sums the windows that contain it, in their order.
void mean_pool_backward(const Tensor& d_x, const Tensor& d_out, const PoolSizes& s, Into into,
                        const Stream& stream) {
  each_plane(s, stream, [&](std::size_t first, std::size_t past) {
    std::vector<float> gradients(count(s.positions())), row(count(s.x.in));
    for (std::size_t plane = first; plane < past; ++plane) {
      image::load_floats(gradients.data(), d_out, plane * gradients.size(), gradients.size());
      for (long h = 0; h < s.y.in; ++h) {
        std::fill(row.begin(), row.end(), 0.0f);
        for (long y = s.y.first_window(h); y < s.y.out && s.y.begin(y) <= h; ++y) {
          if (s.y.end(y) <= h) continue;
          for (long i = 0; i < s.x.out; ++i) {
            const float share =
                gradients[count(y * s.x.out + i)] / static_cast<float>(s.y.terms(y) * s.x.terms(i));
            for (long c = s.x.begin(i); c < s.x.end(i); ++c) row[count(c)] += share;
          }
        }
        image::store_floats(d_x, plane * count(s.plane()) + count(h * s.x.in), row.data(), row.size(), into);
      }
    }
  });
}

/// Errc::invalid_argument unless `indices` are i32, contiguous, of this shape and on this device.
void check_positions(const char* op, const Tensor& indices, const Tensor& like) {
  require(indices.defined() && indices.dtype() == DType::i32 && indices.contiguous() &&
              indices.shape() == like.shape() && indices.device() == like.device(),
          Errc::invalid_argument, op, ": indices must be i32 ", name(like.shape()), " on ",
          name(like.device()), ", and are ",
          indices.defined()
              ? concat(name(indices.dtype()), " ", name(indices.shape()), " on ", name(indices.device()))
              : "undefined");
}

}  // namespace

PoolSizes pool_sizes(const char* op, const Shape& x, const Pool2d& p) {
  const Size2 stride(p.stride.h ? p.stride.h : p.kernel.h, p.stride.w ? p.stride.w : p.kernel.w);
  const auto refuse = [&](const char* why) {
    fail(Errc::invalid_argument, op, ": ", why, ": x ", name(x), ", ", text(p, stride));
  };
  if (x.dims() != 4) refuse("images have four extents");
  if (p.kernel.h == 0 || p.kernel.w == 0) refuse("the kernel is empty");
  if (2 * p.padding.h > p.kernel.h || 2 * p.padding.w > p.kernel.w)
    refuse("the padding is at most half of the kernel");
  if (x[2] + 2 * p.padding.h < p.kernel.h || x[3] + 2 * p.padding.w < p.kernel.w)
    refuse("the kernel is larger than the padded image");
  if (x[2] * x[3] > std::size_t{1} << 31) refuse("a plane has more than 2^31 elements");
  const auto axis = [](std::size_t in, std::size_t kernel, std::size_t step, std::size_t padding) {
    return PoolAxis{number(in), number((in + 2 * padding - kernel) / step + 1), number(kernel), number(step),
                    number(padding)};
  };
  return {number(x[0] * x[1]), axis(x[2], p.kernel.h, stride.h, p.padding.h),
          axis(x[3], p.kernel.w, stride.w, p.padding.w)};
}

PoolSizes adaptive_sizes(const char* op, const Shape& x, const Shape& out) {
  const bool fits = x.dims() == 4 && out.dims() == 4 && x[0] == out[0] && x[1] == out[1] && out[2] > 0 &&
                    out[3] > 0 && x[2] > 0 && x[3] > 0;
  require(fits, Errc::invalid_argument, op, ": these shapes do not fit together: out ", name(out), ", x ",
          name(x));
  return {
      number(x[0] * x[1]), {number(x[2]), number(out[2]), 0, 0, 0}, {number(x[3]), number(out[3]), 0, 0, 0}};
}

}  // namespace image

Shape pool2d_shape(const char* op, const Shape& x, const Pool2d& pool) {
  const auto s = image::pool_sizes(op, x, pool);
  return {x[0], x[1], static_cast<std::size_t>(s.y.out), static_cast<std::size_t>(s.x.out)};
}

void max_pool2d(const Tensor& out, const Tensor& indices, const Tensor& x, const Pool2d& pool,
                const Stream& stream) {
  constexpr const char* op = "max_pool2d";
  const auto s = image::pool_sizes(op, x.shape(), pool);
  check(op, {{"out", out}, {"x", x}}, out.shape() == pool2d_shape(op, x.shape(), pool));
  image::check_positions(op, indices, out);
  check_dtype(op, x.dtype(), {{"out", out}});
  if (const auto* d = on_device(op, out, stream)) return d->max_pool2d(out, indices, x, pool, stream);
  using image::count;
  std::int32_t* const to = indices.data<std::int32_t>();
  image::each_plane(s, stream, [&](std::size_t first, std::size_t past) {
    std::vector<float> largest(count(s.x.in) + image::room), row(count(s.x.out));
    std::vector<std::int32_t> rows(largest.size());
    for (std::size_t plane = first; plane < past; ++plane)
      for (long y = 0; y < s.y.out; ++y) {
        HWY_DYNAMIC_DISPATCH(largest_of_columns)
        (largest.data(), rows.data(), x, plane * count(s.plane()), count(s.x.in), s.y.begin(y), s.y.end(y));
        const std::size_t at = plane * count(s.positions()) + count(y * s.x.out);
        image::max_pool_row(row.data(), to + at, largest.data(), rows.data(), s.x);
        image::store_floats(out, at, row.data(), row.size(), Into::overwrite);
      }
  });
}

void max_pool2d_backward(const Tensor& d_x, const Tensor& d_out, const Tensor& indices, const Pool2d& pool,
                         Into into, const Stream& stream) {
  constexpr const char* op = "max_pool2d_backward";
  const auto s = image::pool_sizes(op, d_x.shape(), pool);
  check(op, {{"d_x", d_x}, {"d_out", d_out}}, d_out.shape() == pool2d_shape(op, d_x.shape(), pool));
  image::check_positions(op, indices, d_out);
  check_dtype(op, d_x.dtype(), {{"d_out", d_out}});
  if (const auto* d = on_device(op, d_x, stream))
    return d->max_pool2d_backward(d_x, d_out, indices, pool, into, stream);
  using image::count;
  const std::int32_t* const from = indices.data<std::int32_t>();
  image::each_plane(s, stream, [&](std::size_t first, std::size_t past) {
    std::vector<float> sums(count(s.plane())), gradients(count(s.positions()));
    for (std::size_t plane = first; plane < past; ++plane) {
      std::fill(sums.begin(), sums.end(), 0.0f);
      image::load_floats(gradients.data(), d_out, plane * gradients.size(), gradients.size());
      for (std::size_t i = 0; i < gradients.size(); ++i)
        sums[static_cast<std::size_t>(from[plane * gradients.size() + i])] += gradients[i];
      image::store_floats(d_x, plane * sums.size(), sums.data(), sums.size(), into);
    }
  });
}

void avg_pool2d(const Tensor& out, const Tensor& x, const Pool2d& pool, const Stream& stream) {
  constexpr const char* op = "avg_pool2d";
  const auto s = image::pool_sizes(op, x.shape(), pool);
  check(op, {{"out", out}, {"x", x}}, out.shape() == pool2d_shape(op, x.shape(), pool));
  check_dtype(op, x.dtype(), {{"out", out}});
  if (const auto* d = on_device(op, out, stream)) return d->avg_pool2d(out, x, pool, stream);
  image::mean_pool(out, x, s, stream);
}

void avg_pool2d_backward(const Tensor& d_x, const Tensor& d_out, const Pool2d& pool, Into into,
                         const Stream& stream) {
  constexpr const char* op = "avg_pool2d_backward";
  const auto s = image::pool_sizes(op, d_x.shape(), pool);
  check(op, {{"d_x", d_x}, {"d_out", d_out}}, d_out.shape() == pool2d_shape(op, d_x.shape(), pool));
  check_dtype(op, d_x.dtype(), {{"d_out", d_out}});
  if (const auto* d = on_device(op, d_x, stream))
    return d->avg_pool2d_backward(d_x, d_out, pool, into, stream);
  image::mean_pool_backward(d_x, d_out, s, into, stream);
}

void adaptive_avg_pool2d(const Tensor& out, const Tensor& x, const Stream& stream) {
  constexpr const char* op = "adaptive_avg_pool2d";
  const auto s = image::adaptive_sizes(op, x.shape(), out.shape());
  check(op, {{"out", out}, {"x", x}}, true);
  check_dtype(op, x.dtype(), {{"out", out}});
  if (const auto* d = on_device(op, out, stream)) return d->adaptive_avg_pool2d(out, x, stream);
  image::mean_pool(out, x, s, stream);
}

void adaptive_avg_pool2d_backward(const Tensor& d_x, const Tensor& d_out, Into into, const Stream& stream) {
  constexpr const char* op = "adaptive_avg_pool2d_backward";
  const auto s = image::adaptive_sizes(op, d_x.shape(), d_out.shape());
  check(op, {{"d_x", d_x}, {"d_out", d_out}}, true);
  check_dtype(op, d_x.dtype(), {{"d_out", d_out}});
  if (const auto* d = on_device(op, d_x, stream))
    return d->adaptive_avg_pool2d_backward(d_x, d_out, into, stream);
  image::mean_pool_backward(d_x, d_out, s, into, stream);
}

}  // namespace ops
}  // namespace rz
#endif
