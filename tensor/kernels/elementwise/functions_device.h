#pragma once
/// The operators of tensor/element_ops.inc on a device, chosen at run time: the kernels are limited by
/// memory, so that one kernel serves all operators. For .cu files.

#include <cmath>

#include "comm/device/launch.h"
#include "tensor/element_ops.h"

namespace rz::ops::device::functions {

/// 1 / (1 + e^-x) and 1 / (1 + e^x), their difference from 1, without overflow or cancellation.
struct Logistic {
  float value, rest;
  __device__ explicit Logistic(float x) {
    const float e = expf(-fabsf(x)), larger = 1 / (1 + e), smaller = e * larger;
    value = x < 0 ? smaller : larger;
    rest = x < 0 ? larger : smaller;
  }
};

// ---- one operand: the value, and the gradient by dy and what the list names, each with the operator's
// parameter if it has one

struct exp {
  __device__ static float value(float x) { return expf(x); }
  __device__ static float gradient(float dy, float y) { return dy * y; }
};
struct log {
  __device__ static float value(float x) { return logf(x); }
  __device__ static float gradient(float dy, float x) { return dy / x; }
};
struct sqrt {
  __device__ static float value(float x) { return sqrtf(x); }
  __device__ static float gradient(float dy, float y) { return dy * 0.5f / y; }
};
struct rsqrt {
  __device__ static float value(float x) { return 1 / sqrtf(x); }
  __device__ static float gradient(float dy, float y) { return dy * -0.5f * y * (y * y); }
};
struct reciprocal {
  __device__ static float value(float x) { return 1 / x; }
  __device__ static float gradient(float dy, float y) { return -dy * (y * y); }
};
struct abs {
  __device__ static float value(float x) { return fabsf(x); }
  __device__ static float gradient(float dy, float x) { return x == 0 ? 0 : x < 0 ? -dy : dy; }
};
struct relu {
  __device__ static float value(float x) { return x < 0 ? 0 : x; }  // NaN stays NaN
  __device__ static float gradient(float dy, float x) { return x <= 0 ? 0 : dy; }
};
struct sigmoid {
  __device__ static float value(float x) { return Logistic(x).value; }
  __device__ static float gradient(float dy, float y) { return dy * (y * (1 - y)); }
};
struct silu {
  __device__ static float value(float x) { return x * Logistic(x).value; }
  __device__ static float gradient(float dy, float x) {
    const Logistic s(x);
    return dy * fmaf(x * s.value, s.rest, s.value);
  }
};
struct tanh {
  __device__ static float value(float x) { return tanhf(x); }
  __device__ static float gradient(float dy, float y) { return dy * ((1 - y) * (1 + y)); }
};

struct sin {
  __device__ static float value(float x) { return sinf(x); }
  __device__ static float gradient(float dy, float x) { return dy * cosf(x); }
};
struct cos {
  __device__ static float value(float x) { return cosf(x); }
  __device__ static float gradient(float dy, float x) { return dy * -sinf(x); }
};
struct softplus {
  __device__ static float value(float x) { return x > 20 ? x : log1pf(expf(x)); }
  __device__ static float gradient(float dy, float x) { return x > 20 ? dy : dy * Logistic(x).value; }
};
struct gelu_erf {
  /// The normal distribution, ½ erfc z with z = -x / √2. The rounding of z would be magnified 2z² times: its
  /// rest is a term of its own.
  __device__ static float normal(float x) {
    const float root = -0.707106781f, rest_of_root = -1.21016174e-8f, z = root * x;
    const float rest = fmaf(root, x, -z) + rest_of_root * x;
    const float correction = z > 0 && z < 20 ? 1.12837917f * rest * expf(-z * z) : 0;  // 2/√π: of erfc'
    return 0.5f * (erfcf(z) - correction);
  }
  __device__ static float value(float x) { return x * normal(x); }
  __device__ static float gradient(float dy, float x) {
    return dy * fmaf(x, 0.398942280f * expf(-0.5f * x * x), normal(x));
  }
};
struct elu {
  __device__ static float value(float x, float alpha) { return x < 0 ? alpha * expm1f(x) : x; }
  __device__ static float gradient(float dy, float x, float alpha) {
    return x <= 0 ? dy * (alpha * expf(x)) : dy;
  }
};
struct leaky_relu {
  __device__ static float value(float x, float slope) { return gradient(x, x, slope); }
  __device__ static float gradient(float dy, float x, float slope) { return x > 0 ? dy : dy * slope; }
};
/// The power of one operand with an exponent, and of two operands.
struct pow {
  __device__ static float value(float x, float exponent) {
    return exponent == 1       ? x
           : exponent == 2     ? x * x
           : exponent == 3     ? x * x * x
           : exponent == 0.5f  ? sqrtf(x)
           : exponent == -0.5f ? 1 / sqrtf(x)
           : exponent == -1    ? 1 / x
                               : powf(x, exponent);
  }
  __device__ static float gradient(float dy, float x, float exponent) {
    return exponent == 0 ? 0 : dy * (exponent * value(x, exponent - 1));
  }
  __device__ static float first(float dy, float x, float y) { return y == 0 ? 0 : dy * (y * powf(x, y - 1)); }
  __device__ static float second(float dy, float x, float y) {
    return x == 0 && y >= 0 ? 0 : dy * (powf(x, y) * logf(x));
  }
};

// ---- two operands: the value, and the gradients by dy and both

struct add {
  __device__ static float value(float x, float y) { return x + y; }
  __device__ static float first(float dy, float, float) { return dy; }
  __device__ static float second(float dy, float, float) { return dy; }
};
struct sub {
  __device__ static float value(float x, float y) { return x - y; }
  __device__ static float first(float dy, float, float) { return dy; }
  __device__ static float second(float dy, float, float) { return -dy; }
};
struct mul {
  __device__ static float value(float x, float y) { return x * y; }
  __device__ static float first(float dy, float, float y) { return dy * y; }
  __device__ static float second(float dy, float x, float) { return dy * x; }
};
struct div {
  __device__ static float value(float x, float y) { return x / y; }
  __device__ static float first(float dy, float, float y) { return dy / y; }
  __device__ static float second(float dy, float x, float y) { return -dy * (x / y / y); }
};
struct minimum {
  __device__ static float value(float x, float y) { return x != x || x < y ? x : y; }
  __device__ static float first(float dy, float x, float y) { return x > y ? 0 : x == y ? dy * 0.5f : dy; }
  __device__ static float second(float dy, float x, float y) { return first(dy, y, x); }
};
struct maximum {
  __device__ static float value(float x, float y) { return x != x || x > y ? x : y; }
  __device__ static float first(float dy, float x, float y) { return x < y ? 0 : x == y ? dy * 0.5f : dy; }
  __device__ static float second(float dy, float x, float y) { return first(dy, y, x); }
};

struct Comparison {
  __device__ static float first(float, float, float) { return 0; }
  __device__ static float second(float, float, float) { return 0; }
};
struct eq : Comparison {
  __device__ static float value(float x, float y) { return x == y; }
};
struct ne : Comparison {
  __device__ static float value(float x, float y) { return x != y; }
};
struct lt : Comparison {
  __device__ static float value(float x, float y) { return x < y; }
};
struct le : Comparison {
  __device__ static float value(float x, float y) { return x <= y; }
};
struct gt : Comparison {
  __device__ static float value(float x, float y) { return x > y; }
};
struct ge : Comparison {
  __device__ static float value(float x, float y) { return x >= y; }
};

// ---- by operator

__device__ inline float value(Unary op, float parameter, float x) {
  switch (op) {
#define RZ_UNARY(name, saved, cast) \
  case Unary::name:                 \
    return name::value(x);
#define RZ_PARAMETRIC(name, saved, cast, parameter_) \
  case Unary::name:                                  \
    return name::value(x, parameter);
#include "tensor/element_ops.inc"
  }
  return x;
}
__device__ inline float gradient(Unary op, float parameter, float dy, float saved) {
  switch (op) {
#define RZ_UNARY(name, saved_, cast) \
  case Unary::name:                  \
    return name::gradient(dy, saved);
#define RZ_PARAMETRIC(name, saved_, cast, parameter_) \
  case Unary::name:                                   \
    return name::gradient(dy, saved, parameter);
#include "tensor/element_ops.inc"
  }
  return dy;
}
__device__ inline float value(Binary op, float x, float y) {
  switch (op) {
#define RZ_BINARY(name) \
  case Binary::name:    \
    return name::value(x, y);
#include "tensor/element_ops.inc"
  }
  return x;
}
__device__ inline float gradient(Binary op, int operand, float dy, float x, float y) {
  switch (op) {
#define RZ_BINARY(name) \
  case Binary::name:    \
    return operand == 0 ? name::first(dy, x, y) : name::second(dy, x, y);
#include "tensor/element_ops.inc"
  }
  return dy;
}

}  // namespace rz::ops::device::functions
