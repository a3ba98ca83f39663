#pragma once
/// The operators on CUDA devices, as a table. In a build with CUDA the .cu files of the rooms below this
/// folder fill it; in tests, the same files compiled for an emulated device.

#include "tensor/attention_ops.h"
#include "tensor/image_ops.h"
#include "tensor/kernels/device_optimizer.h"
#include "tensor/kernels/strided_copy.h"
#include "tensor/loss_ops.h"
#include "tensor/ops.h"
#include "tensor/shape_ops.h"

namespace rz::ops {

/// Each entry implements the function of the same name in tensor, which has checked shapes and devices.
/// Sums are in f32 or wider and run in a fixed order.
struct DeviceOps {
#define RZ_OP(name) decltype(&ops::name) name;
#include "tensor/kernels/ops.inc"
#undef RZ_OP
  DeviceOptimizer optimizer;
};

/// The table. Errc::unsupported in a build without CUDA.
const DeviceOps& device_ops();

/// Null for a host tensor, otherwise the table. Errc::invalid_argument if the stream belongs to a different
/// device.
const DeviceOps* on_device(const char* op, const Tensor&, const Stream&);

/// The functions behind device_ops(). Each .cu file defines its operators in this namespace.
namespace device {
#define RZ_OP(name) decltype(ops::name) name;
#include "tensor/kernels/ops.inc"
#undef RZ_OP
}  // namespace device

}  // namespace rz::ops
