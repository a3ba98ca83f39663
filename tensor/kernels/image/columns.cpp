#include <cstring>

#include "tensor/kernels/image/conv2d.h"
#include "tensor/kernels/image/planes.h"

namespace rz::ops::image {

namespace {

/// Calls f(column, y, first, past) for the parts of rows of positions in [begin, end): outputs first … past-1
/// of row y, whose first one is at `column`.
template <class F>
void each_row(const ConvSizes& s, std::size_t begin, std::size_t end, const F& f) {
  const std::size_t width = s.x.out;
  for (std::size_t p = begin; p < end;) {
    const std::size_t y = p / width, first = p % width, past = std::min(width, first + (end - p));
    f(p - begin, y, first, past);
    p += past - first;
  }
}

}  // namespace

template <class T>
void read_columns(T* to, std::size_t stride, const T* x, std::size_t channels, const ConvSizes& s,
                  std::size_t begin, std::size_t end) {
  for (std::size_t c = 0; c < channels; ++c, x += s.plane())
    for (std::size_t i = 0; i < s.y.kernel; ++i)
      for (std::size_t j = 0; j < s.x.kernel; ++j, to += stride) {
        const std::size_t top = s.y.begin(i), bottom = s.y.end(i), left = s.x.begin(j), right = s.x.end(j);
        each_row(s, begin, end, [&](std::size_t column, std::size_t y, std::size_t first, std::size_t past) {
          T* const row = to + column;
          const bool inside = y >= top && y < bottom;
          const std::size_t from = inside ? std::clamp(left, first, past) : past,
                            until = inside ? std::clamp(right, from, past) : past;
          std::fill(row, row + (from - first), T{});
          std::fill(row + (until - first), row + (past - first), T{});
          if (from == until) return;
          const T* const in = x + s.y.input(y, i) * s.x.in + s.x.input(from, j);
          T* const out = row + (from - first);
          if (s.x.stride == 1)
            std::memcpy(out, in, (until - from) * sizeof(T));
          else
            for (std::size_t k = 0; k < until - from; ++k) out[k] = in[k * s.x.stride];
        });
      }
}
template void read_columns(float*, std::size_t, const float*, std::size_t, const ConvSizes&, std::size_t,
                           std::size_t);
template void read_columns(f16*, std::size_t, const f16*, std::size_t, const ConvSizes&, std::size_t,
                           std::size_t);
template void read_columns(bf16*, std::size_t, const bf16*, std::size_t, const ConvSizes&, std::size_t,
                           std::size_t);

void add_columns(float* planes, const float* from, std::size_t stride, std::size_t channels,
                 const ConvSizes& s, std::size_t begin, std::size_t end) {
  for (std::size_t c = 0; c < channels; ++c, planes += s.plane())
    for (std::size_t i = 0; i < s.y.kernel; ++i)
      for (std::size_t j = 0; j < s.x.kernel; ++j, from += stride) {
        const std::size_t top = s.y.begin(i), bottom = s.y.end(i), left = s.x.begin(j), right = s.x.end(j);
        each_row(s, begin, end, [&](std::size_t column, std::size_t y, std::size_t first, std::size_t past) {
          if (y < top || y >= bottom) return;
          const std::size_t start = std::clamp(left, first, past), until = std::clamp(right, start, past);
          if (start == until) return;
          const float* const in = from + column + (start - first);
          float* const out = planes + s.y.input(y, i) * s.x.in + s.x.input(start, j);
          if (s.x.stride == 1) return add_floats(out, in, until - start);
          for (std::size_t k = 0; k < until - start; ++k) out[k * s.x.stride] += in[k];
        });
      }
}

}  // namespace rz::ops::image
