// Runs of consecutive elements are copied or added row by row. Transpositions go through tiles of whole cache
// lines on both sides, in which blocks of 128 bits are transposed in registers. Threads split the output.

#include "tensor/kernels/strided_copy.h"

#include "comm/core/integer_math.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tensor/kernels/layout/strided_copy.cpp"
#include <hwy/aligned_allocator.h>
#include <hwy/cache_control.h>
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cstring>

#include "tensor/kernels/device_ops.h"
#include "tensor/kernels/transpose-inl.h"
#include "tensor/kernels/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace rz {
namespace HWY_NAMESPACE {

template <class T>
HWY_INLINE void transpose_tile_of(T* out, std::size_t out_stride, const T* in, std::size_t in_stride,
                                  std::size_t rows, std::size_t columns) {
  constexpr std::size_t line = 64 / sizeof(T);
  const std::size_t whole_rows = rows / line * line, whole_columns = columns / line * line;
  // Processors do not foresee so many strides.
  const auto prefetch = [&](std::size_t r, std::size_t c) HWY_ATTR {
    for (std::size_t next = 0; next < line; ++next) {
      __builtin_prefetch(in + (r + next) * in_stride + c);
      __builtin_prefetch(out + (c + next) * out_stride + r, 1);
    }
  };
  for (std::size_t r = 0; r < whole_rows; r += line)
    for (std::size_t c = 0; c < whole_columns; c += line) {
      if (c + line < whole_columns)
        prefetch(r, c + line);
      else if (r + line < whole_rows)
        prefetch(r + line, 0);
      transpose_lines(out + c * out_stride + r, out_stride, in + r * in_stride + c, in_stride);
    }
  for (std::size_t c = 0; c < columns; ++c)
    for (std::size_t r = c < whole_columns ? whole_rows : 0; r < rows; ++r)
      out[c * out_stride + r] = in[r * in_stride + c];
}

/// out[c · out_stride + r] = in[r · in_stride + c] of elements of `size` bytes.
void transpose_tile(std::byte* out, std::size_t out_stride, const std::byte* in, std::size_t in_stride,
                    std::size_t rows, std::size_t columns, std::size_t size) {
  ops::dispatch_size(size, [&](auto word) HWY_ATTR {
    using T = decltype(word);
    transpose_tile_of(reinterpret_cast<T*>(out), out_stride, reinterpret_cast<const T*>(in), in_stride, rows,
                      columns);
  });
}

/// Copies `rows` rows of n bytes. Short rows are not worth a call. Whole cache lines of large outputs are
/// stored past the caches, which need not read them first.
void copy_rows(std::byte* out, std::size_t out_step, const std::byte* in, std::size_t in_step,
               std::size_t rows, std::size_t n, bool past_caches) {
  const hn::ScalableTag<std::uint8_t> d;
  constexpr std::size_t line = 64, short_row = 1024;
  const std::size_t lanes = hn::Lanes(d);
  const bool streams = past_caches && n >= 4 * line && line % lanes == 0;
  for (std::size_t row = 0; row < rows; ++row, out += out_step, in += in_step) {
    auto* const to = reinterpret_cast<std::uint8_t*>(out);
    const auto* const from = reinterpret_cast<const std::uint8_t*>(in);
    if (streams) {
      const std::size_t first = (line - reinterpret_cast<std::uintptr_t>(to) % line) % line;
      const std::size_t past = first + (n - first) / line * line;
      std::memcpy(to, from, first);
      for (std::size_t i = first; i < past; i += lanes) hn::Stream(hn::LoadU(d, from + i), d, to + i);
      std::memcpy(to + past, from + past, n - past);
    } else if (n < lanes || n > short_row) {
      std::memcpy(to, from, n);
    } else {
      for (std::size_t i = 0; i + lanes < n; i += lanes) hn::StoreU(hn::LoadU(d, from + i), d, to + i);
      hn::StoreU(hn::LoadU(d, from + n - lanes), d, to + n - lanes);
    }
  }
  if (streams) hwy::FlushStream();
}

/// out[i] += in[i] of n consecutive floats of this type.
void add_run(std::byte* out, const std::byte* in, std::size_t n, DType dtype) {
  ops::dispatch_dtype(dtype, [&](auto t) HWY_ATTR {
    using T = decltype(t);
    map_into(
        true, reinterpret_cast<T*>(out), n, [](auto x) HWY_ATTR { return x; },
        reinterpret_cast<const T*>(in));
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace rz
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace rz {

HWY_EXPORT(transpose_tile);
HWY_EXPORT(copy_rows);
HWY_EXPORT(add_run);

namespace ops {

namespace {

constexpr std::size_t elements_per_task = 4096;
constexpr std::size_t tile_rows = 64, tile_columns = 256;

/// Without the last extent, or another one.
IndexMap without(const IndexMap& map, int dimension) {
  IndexMap rest;
  for (int d = 0; d < map.dims; ++d)
    if (d != dimension)
      rest.extent[rest.dims] = map.extent[d], rest.stride[rest.dims] = map.stride[d], ++rest.dims;
  return rest;
}

void swap(StridedCopy& c, int a, int b) {
  std::swap(c.out.extent[a], c.out.extent[b]), std::swap(c.in.extent[a], c.in.extent[b]);
  std::swap(c.out.stride[a], c.out.stride[b]), std::swap(c.in.stride[a], c.in.stride[b]);
}

/// The table's form: at least one extent, ordered by the output's strides.
StridedCopy simplified(const StridedCopy& given) {
  StridedCopy c = given;
  c.out.dims = c.in.dims = 0;
  const auto append = [&](std::size_t extent, std::size_t out_stride, std::size_t in_stride) {
    const int d = c.out.dims++;
    c.in.dims = c.out.dims;
    c.out.extent[d] = c.in.extent[d] = extent;
    c.out.stride[d] = out_stride, c.in.stride[d] = in_stride;
  };
  for (int d = 0; d < given.out.dims; ++d)
    if (given.out.extent[d] != 1) append(given.out.extent[d], given.out.stride[d], given.in.stride[d]);
  for (int d = 1; d < c.out.dims; ++d)
    for (int at = d; at > 0 && c.out.stride[at - 1] < c.out.stride[at]; --at) swap(c, at - 1, at);
  const StridedCopy ordered = c;
  c.out.dims = c.in.dims = 0;
  for (int d = 0; d < ordered.out.dims; ++d) {
    const std::size_t extent = ordered.out.extent[d], to = ordered.out.stride[d], from = ordered.in.stride[d];
    const int before = c.out.dims - 1;
    if (before >= 0 && c.out.stride[before] == extent * to && c.in.stride[before] == extent * from) {
      c.out.extent[before] = c.in.extent[before] *= extent;
      c.out.stride[before] = to, c.in.stride[before] = from;
    } else {
      append(extent, to, from);
    }
  }
  if (c.out.dims == 0) append(1, 1, 1);
  return c;
}

/// Rows of the last extent, or a part of one: n elements each, of which the first are at these places.
struct Run {
  std::size_t out_at, in_at, n;
  std::size_t rows = 1, out_step = 0, in_step = 0;
};

/// Calls f(Run) for all elements [begin, end) of the index space.
template <class F>
void each_run(const StridedCopy& c, std::size_t begin, std::size_t end, const F& f) {
  const int last = c.out.dims - 1;
  const std::size_t n = c.out.extent[last];
  const IndexMap to = without(c.out, last), from = without(c.in, last);
  const std::size_t rows = last > 0 ? c.out.extent[last - 1] : 1;  // of which the places are a step apart
  const std::size_t out_step = last > 0 ? c.out.stride[last - 1] : 0,
                    in_step = last > 0 ? c.in.stride[last - 1] : 0;
  std::size_t row = begin / n, column = begin - row * n;
  while (begin < end) {
    const std::size_t out_at = c.out_at + to.offset(row), in_at = c.in_at + from.offset(row);
    const bool whole = column == 0 && end - begin >= n;
    const Run run{out_at + column * c.out.stride[last],
                  in_at + column * c.in.stride[last],
                  std::min(n - column, end - begin),
                  whole ? std::min(rows - row % rows, (end - begin) / n) : 1,
                  out_step,
                  in_step};
    f(run);
    row += run.rows, begin += run.rows * run.n, column = 0;
  }
}

constexpr std::size_t past_caches_from = std::size_t{16} << 20;  // bytes of an output

void copy_runs(const Tensor& out, const Tensor& in, const StridedCopy& given, Into into,
               const Stream& stream) {
  const std::size_t size = size_of(out.dtype());
  const std::size_t written = given.is_part ? out.bytes() : given.out.count() * size;
  const bool past_caches = written >= past_caches_from;
  StridedCopy c = given;
  if (past_caches)  // in the order of the input, whose reads are awaited
    for (int d = 1; d < c.out.dims - 1; ++d)
      for (int at = d; at > 0 && c.in.stride[at - 1] < c.in.stride[at]; --at) swap(c, at - 1, at);
  std::byte *const to = out.raw(), *const from = in.raw();
  stream.parallel_for(c.out.count(), elements_per_task, [&](std::size_t begin, std::size_t end) {
    each_run(c, begin, end, [&](const Run& r) {
      if (into == Into::overwrite)
        return HWY_DYNAMIC_DISPATCH(copy_rows)(to + r.out_at * size, r.out_step * size, from + r.in_at * size,
                                               r.in_step * size, r.rows, r.n * size, past_caches);
      for (std::size_t i = 0; i < r.rows; ++i) HWY_DYNAMIC_DISPATCH(add_run)
      (to + (r.out_at + i * r.out_step) * size, from + (r.in_at + i * r.in_step) * size, r.n, out.dtype());
    });
  });
}

/// Element by element.
void copy_single(const Tensor& out, const Tensor& in, const StridedCopy& c, Into into, const Stream& stream) {
  const std::size_t to_next = c.out.stride[c.out.dims - 1], from_next = c.in.stride[c.in.dims - 1];
  const auto each = [&](const auto& f) {
    stream.parallel_for(c.out.count(), elements_per_task, [&](std::size_t begin, std::size_t end) {
      each_run(c, begin, end, [&](const Run& r) {
        for (std::size_t row = 0; row < r.rows; ++row)
          for (std::size_t i = 0; i < r.n; ++i)
            f(r.out_at + row * r.out_step + i * to_next, r.in_at + row * r.in_step + i * from_next);
      });
    });
  };
  if (into == Into::accumulate)
    return dispatch_dtype(out.dtype(), [&](auto t) {
      using T = decltype(t);
      T *const to = out.data<T>(), *const from = in.data<T>();
      each([=](std::size_t o, std::size_t i) { to[o] = from_f32<T>(to_f32(to[o]) + to_f32(from[i])); });
    });
  dispatch_size(size_of(out.dtype()), [&](auto word) {
    using T = decltype(word);
    T *const to = reinterpret_cast<T*>(out.raw()), *const from = reinterpret_cast<T*>(in.raw());
    each([=](std::size_t o, std::size_t i) { to[o] = from[i]; });
  });
}

struct Tile {
  std::byte *out, *in;
  std::size_t rows, columns;
};

void transpose_one(const Tile& tile, const Transposition& t, DType dtype, Into into) {
  const std::size_t size = size_of(dtype);
  if (into == Into::overwrite)
    return HWY_DYNAMIC_DISPATCH(transpose_tile)(tile.out, t.out_stride, tile.in, t.in_stride, tile.rows,
                                                tile.columns, size);
  constexpr std::size_t some = 64;  // columns
  HWY_ALIGN std::byte turned[tile_rows * some * sizeof(float)];
  for (std::size_t first = 0; first < tile.columns; first += some) {
    const std::size_t columns = std::min(some, tile.columns - first);
    const auto to = [&](std::size_t c) { return tile.out + (first + c) * t.out_stride * size; };
    for (std::size_t c = 0; c < columns; ++c)
      for (std::size_t line = 0; line < tile.rows * size; line += 64) __builtin_prefetch(to(c) + line, 1);
    HWY_DYNAMIC_DISPATCH(transpose_tile)
    (turned, tile_rows, tile.in + first * size, t.in_stride, tile.rows, columns, size);
    for (std::size_t c = 0; c < columns; ++c)
      HWY_DYNAMIC_DISPATCH(add_run)(to(c), turned + c * tile_rows * size, tile.rows, dtype);
  }
}

void transpose_all(const Tensor& out, const Tensor& in, const StridedCopy& c, const Transposition& t,
                   Into into, const Stream& stream) {
  const std::size_t size = size_of(out.dtype());
  const std::size_t down = ceil_div(t.rows, tile_rows), across = ceil_div(t.columns, tile_columns);
  const std::size_t per_tile = std::min(t.rows, tile_rows) * std::min(t.columns, tile_columns);
  const std::size_t grain = std::max<std::size_t>(1, elements_per_task / per_tile);
  stream.parallel_for(t.out.count() * down * across, grain, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
      const std::size_t matrix = i / (down * across), tile = i % (down * across);
      const std::size_t row = tile % down * tile_rows, column = tile / down * tile_columns;
      const std::size_t out_at = c.out_at + t.out.offset(matrix) + column * t.out_stride + row;
      const std::size_t in_at = c.in_at + t.in.offset(matrix) + row * t.in_stride + column;
      transpose_one({out.raw() + out_at * size, in.raw() + in_at * size, std::min(tile_rows, t.rows - row),
                     std::min(tile_columns, t.columns - column)},
                    t, out.dtype(), into);
    }
  });
}

}  // namespace

IndexMap layout_of(const Tensor& t) {
  IndexMap map;
  map.dims = t.shape().dims();
  for (int d = map.dims - 1; d >= 0; --d) {
    map.extent[d] = t.shape()[d];
    map.stride[d] = d == map.dims - 1   ? 1
                    : d == map.dims - 2 ? t.row_stride()
                                        : map.stride[d + 1] * map.extent[d + 1];
  }
  return map;
}

std::optional<Transposition> transposition(const StridedCopy& c) {
  const int last = c.out.dims - 1;
  if (c.out.stride[last] != 1) return std::nullopt;
  for (int d = 0; d < last; ++d)
    if (c.in.stride[d] == 1)
      return Transposition{without(without(c.out, last), d),
                           without(without(c.in, last), d),
                           c.out.extent[last],
                           c.out.extent[d],
                           c.out.stride[d],
                           c.in.stride[last]};
  return std::nullopt;
}

void strided_copy(const char* op, const Tensor& out, const Tensor& in, const StridedCopy& given, Into into,
                  const Stream& stream) {
  if (given.out.count() == 0) return;
  const StridedCopy c = simplified(given);
  if (const auto* d = on_device(op, out, stream)) return d->strided_copy(op, out, in, c, into, stream);
  const int last = c.out.dims - 1;
  if (c.out.stride[last] == 1 && c.in.stride[last] == 1) return copy_runs(out, in, c, into, stream);
  if (const auto t = transposition(c)) return transpose_all(out, in, c, *t, into, stream);
  copy_single(out, in, c, into, stream);
}

}  // namespace ops
}  // namespace rz
#endif
