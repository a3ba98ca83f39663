// The formulas of gelu.cpp, without cancellation.

#include "tensor/kernels/device_ops.h"
#include "tensor/kernels/map_elements.h"

namespace rz::ops::device {

namespace {

constexpr float root = 1.5957691216057307f;  // 2 √(2/π)
constexpr float root_cubic = static_cast<float>(1.5957691216057307 * 0.044715);

/// e^-2u
__device__ inline float decay(float x, float square) { return expf(x * fmaf(square, -root_cubic, -root)); }

struct Gelu : Function<1> {
  __device__ float operator()(const float* in) const {
    const float x = in[0];
    return x * (1 / (1 + decay(x, x * x)));
  }
};

struct GeluBackward : Function<2> {
  __device__ float operator()(const float* in) const {
    // Beyond |x| = 9 the derivative is 0 or 1 to the last bit; x is clamped there, so that no product
    // overflows. That of an infinity is NaN.
    if (fabsf(in[1]) == INFINITY) return in[1] - in[1];
    const float x = fabsf(in[1]) > 9 ? copysignf(9, in[1]) : in[1];
    const float square = x * x, e = decay(x, square), s = 1 / (1 + e);
    const float twice_du = fmaf(square, 3 * root_cubic, root);
    return in[0] * fmaf(x * s, e * s * twice_du, s);
  }
};

}  // namespace

void gelu(const Tensor& out, const Tensor& in, const Stream& stream) { map("gelu", Gelu{}, stream, out, in); }

void gelu_backward(const Tensor& d_in, const Tensor& d_out, const Tensor& in, Into into,
                   const Stream& stream) {
  map_into("gelu_backward", GeluBackward{}, into == Into::accumulate, stream, d_in, d_out, in);
}

}  // namespace rz::ops::device
