#include "tensor/kernels/device_ops.h"

namespace rz::ops {

const DeviceOps* on_device(const char* op, const Tensor& t, const Stream& stream) {
  if (t.device() != stream.device())
    fail(Errc::invalid_argument, op, ": the tensors are on ", name(t.device()), ", but the stream is of ",
         name(stream.device()));
  return t.device().kind == Device::host ? nullptr : &device_ops();
}

}  // namespace rz::ops
