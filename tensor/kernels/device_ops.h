#pragma once
/// The operators on CUDA devices, as one table: filled by the .cu files of this folder in a build with CUDA,
/// and in tests by the same files compiled for an emulated device.

#include "tensor/kernels/device_optimizer.h"
#include "tensor/ops.h"

namespace rz::ops {

/// Each as its namesake in tensor/ops.h, after that one's checks of shapes and devices. Tensors are f32, f16
/// or bf16, all of one call alike, except statistics (mean, inverse_deviation, log_sum, losses: f32) and
/// gradients of parameters, which may be f32 beside 16-bit values. Sums are made in f32 at least and run in a
/// fixed order.
struct DeviceOps {
#define RZ_OP(name) decltype(&ops::name) name;
#include "tensor/kernels/ops.inc"
#undef RZ_OP
  DeviceOptimizer optimizer;
};

/// Errc::unsupported in a build without CUDA.
const DeviceOps& device_ops();

/// Null for tensors on the host; else the table. Errc::invalid_argument if the stream belongs to another
/// device than the tensor.
const DeviceOps* on_device(const char* op, const Tensor&, const Stream&);

/// What device_ops() hands out: each .cu file defines its operators here.
namespace device {
#define RZ_OP(name) decltype(ops::name) name;
#include "tensor/kernels/ops.inc"
#undef RZ_OP
}  // namespace device

}  // namespace rz::ops
