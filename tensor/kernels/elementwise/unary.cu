#include "tensor/kernels/device_ops.h"
#include "tensor/kernels/elementwise/functions_device.h"
#include "tensor/kernels/map_elements.h"

namespace rz::ops::device {

namespace {

struct Value : Function<1> {
  Unary op;
  float parameter;
  __device__ float operator()(const float* x) const { return functions::value(op, parameter, x[0]); }
};
struct Gradient : Function<2> {
  Unary op;
  float parameter;
  __device__ float operator()(const float* x) const { return functions::gradient(op, parameter, x[0], x[1]); }
};
struct Affine : Function<1> {
  float factor, shift;
  __device__ float operator()(const float* x) const { return fmaf(x[0], factor, shift); }
};
struct Clamp : Function<1> {
  float low, high;
  __device__ float operator()(const float* in) const {
    const float x = in[0] < low ? low : in[0];
    return x > high ? high : x;
  }
};
struct ClampGradient : Function<2> {
  float low, high;
  __device__ float operator()(const float* x) const { return x[1] > low && x[1] < high ? x[0] : 0; }
};

}  // namespace

void unary(const Tensor& out, const Tensor& in, UnaryFunction f, const Stream& stream) {
  map(name_of(f.op), Value{{}, f.op, f.parameter}, stream, out, in);
}

void unary_backward(const Tensor& d_in, const Tensor& d_out, const Tensor& saved, UnaryFunction f, Into into,
                    const Stream& stream) {
  map_into("unary_backward", Gradient{{}, f.op, f.parameter}, into == Into::accumulate, stream, d_in, d_out,
           saved);
}

void affine(const Tensor& out, const Tensor& in, float factor, float shift, const Stream& stream) {
  map("affine", Affine{{}, factor, shift}, stream, out, in);
}

void clamp(const Tensor& out, const Tensor& in, float low, float high, const Stream& stream) {
  map("clamp", Clamp{{}, low, high}, stream, out, in);
}

void clamp_backward(const Tensor& d_in, const Tensor& d_out, const Tensor& in, float low, float high,
                    Into into, const Stream& stream) {
  map_into("clamp_backward", ClampGradient{{}, low, high}, into == Into::accumulate, stream, d_in, d_out, in);
}

}  // namespace rz::ops::device
