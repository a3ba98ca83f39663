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

// ---- one operand: the value, and the gradient by dy and what the list names

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

// ---- by operator

__device__ inline float value(Unary op, float x) {
  switch (op) {
#define RZ_UNARY(name, saved, cast) \
  case Unary::name:                 \
    return name::value(x);
#include "tensor/element_ops.inc"
  }
  return x;
}
__device__ inline float gradient(Unary op, float dy, float saved) {
  switch (op) {
#define RZ_UNARY(name, saved_, cast) \
  case Unary::name:                  \
    return name::gradient(dy, saved);
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
