#include "comm/core/math.h"
#include "comm/device/launch.h"
#include "tensor/kernels/check.h"
#include "tensor/kernels/device_ops.h"
#include "tensor/kernels/dtype_dispatch.h"
#include "tensor/kernels/vector_load.h"

namespace rz::ops::device {

namespace {

struct RotaryCall {
  std::size_t rows, length, heads, size, half, limit, past, out_stride, x_stride;
  const float *cosines, *sines;
  const std::int32_t* positions;  ///< or null
  float sign;                     ///< of the angles
};

/// One thread per `width` pairs of channels. With a width of 1 heads may have channels after the rotated
/// ones, which are copied in pairs.
template <class T, int width>
__global__ void rotate(T* out, const T* x, RotaryCall c) {
  const std::size_t threads = (c.size + 1) / 2 / width,
                    n = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (n >= c.rows * c.heads * threads) return;
  const std::size_t pair = n % threads * width, head = n / threads % c.heads, row = n / threads / c.heads;
  out += row * c.out_stride + head * c.size;
  x += row * c.x_stride + head * c.size;
  const std::int64_t position =
      c.positions ? c.positions[row] : static_cast<std::int64_t>(c.past + row % c.length);
  const bool inside = position >= 0 && static_cast<std::size_t>(position) < c.limit;
  if (pair >= c.half) {
    for (std::size_t d = 2 * pair; d < 2 * pair + 2 && d < c.size; ++d)
      out[d] = inside ? x[d] : from_f32<T>(rz::detail::float_of(0x7fc00000u));
    return;
  }
  const std::size_t at = inside ? static_cast<std::size_t>(position) * c.half + pair : 0;
  float low[width], high[width], cosine[width], sine[width], first[width], second[width];
  if (inside) load(cosine, c.cosines + at), load(sine, c.sines + at);
  load(low, x + pair), load(high, x + pair + c.half);
#pragma unroll
  for (int j = 0; j < width; ++j) {
    const float cos = inside ? cosine[j] : rz::detail::float_of(0x7fc00000u),
                sin = inside ? sine[j] * c.sign : 0;
    first[j] = fmaf(-high[j], sin, low[j] * cos);
    second[j] = fmaf(low[j], sin, high[j] * cos);
  }
  store(out + pair, first), store(out + pair + c.half, second);
}

/// Whether every pack of every row, of both halves of its heads, has an aligned address.
template <class T>
bool has_packs(const RotaryCall& c, const T* out, const T* x) {
  constexpr std::size_t width = pack_width<T>;
  return c.size == 2 * c.half && c.out_stride % width == 0 && c.x_stride % width == 0 &&
         rows_are_packs(c.half, out, x) && rows_are_packs(c.half, c.cosines, c.sines);
}

}  // namespace

void rotary(const Tensor& out, const Tensor& x, int heads, const Tensor& cosines, const Tensor& sines,
            const Tensor& positions, std::size_t past, Rotation rotation, const Stream& stream) {
  const std::size_t count = static_cast<std::size_t>(heads), size = last(x) / count;
  const RotaryCall call{rows(x),
                        x.shape()[1],
                        count,
                        size,
                        last(cosines),
                        cosines.shape()[0],
                        past,
                        out.row_stride(),
                        x.row_stride(),
                        cosines.data<float>(),
                        sines.data<float>(),
                        positions.defined() ? positions.data<std::int32_t>() : nullptr,
                        rotation == Rotation::inverse ? -1.0f : 1.0f};
  dispatch_dtype(x.dtype(), [&](auto t) {
    using T = decltype(t);
    T *const to = out.data<T>(), *const from = x.data<T>();
    constexpr int width = pack_width<T>;
    const bool packs = has_packs(call, to, from);
    const std::size_t threads = (size + 1) / 2 / (packs ? width : 1);
    cuda::launch("rotary", packs ? rotate<T, width> : rotate<T, 1>,
                 cuda::grid_for(call.rows * count * threads, 256, ~std::size_t{0}), stream, to, from, call);
  });
}

}  // namespace rz::ops::device
