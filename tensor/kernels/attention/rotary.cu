#include "comm/core/math.h"
#include "comm/device/launch.h"
#include "tensor/kernels/check.h"
#include "tensor/kernels/device_ops.h"
#include "tensor/kernels/dtype_dispatch.h"

namespace rz::ops::device {

namespace {

struct RotaryCall {
  std::size_t rows, length, heads, size, half, limit, past, out_stride, x_stride;
  const float *cosines, *sines;
  const std::int32_t* positions;  ///< or null
  float sign;                     ///< of the angles
};

/// One thread per pair of channels; the channels after the rotated ones are copied in pairs.
template <class T>
__global__ void rotate(T* out, const T* x, RotaryCall c) {
  const std::size_t pairs = (c.size + 1) / 2, n = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (n >= c.rows * c.heads * pairs) return;
  const std::size_t pair = n % pairs, head = n / pairs % c.heads, row = n / pairs / c.heads;
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
  const float cosine = inside ? c.cosines[at] : rz::detail::float_of(0x7fc00000u),
              sine = inside ? c.sines[at] * c.sign : 0;
  const float low = to_f32(x[pair]), high = to_f32(x[pair + c.half]);
  out[pair] = from_f32<T>(fmaf(-high, sine, low * cosine));
  out[pair + c.half] = from_f32<T>(fmaf(low, sine, high * cosine));
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
    cuda::launch("rotary", rotate<T>,
                 cuda::grid_for(call.rows * count * ((size + 1) / 2), 256, ~std::size_t{0}), stream,
                 out.data<T>(), x.data<T>(), call);
  });
}

}  // namespace rz::ops::device
