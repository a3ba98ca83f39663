#include "tensor/kernels/device_ops.h"

#include "comm/device/meta.h"

namespace rz::ops {

namespace {

/// A function of the same type that does nothing.
template <class... Arguments>
constexpr auto nothing(void (*)(Arguments...)) -> void (*)(Arguments...) {
  return [](Arguments...) {};
}

constexpr DeviceOps meta_ops{
#define RZ_OP(name) .name = nothing(decltype(&ops::name){}),
#include "tensor/kernels/ops.inc"
#undef RZ_OP
    .optimizer = {}};

}  // namespace

const DeviceOps* on_device(const char* op, const Tensor& t, const Stream& stream) {
  if (t.device() != stream.device())
    fail(Errc::invalid_argument, op, ": the tensors are on ", name(t.device()), ", but the stream is of ",
         name(stream.device()));
  if (is_meta(t.device())) return &meta_ops;
  return t.device().kind == Device::host ? nullptr : &device_ops();
}

}  // namespace rz::ops
