#include "tensor/kernels/device_ops.h"

namespace rz::ops {

const DeviceOps& device_ops() {
  fail(Errc::unsupported, "this build has no CUDA: configure it with -DRZ_CUDA=ON where nvcc is installed");
}

}  // namespace rz::ops
