#include "tensor/kernels/device_ops.h"

namespace rz::ops {

const DeviceOps& device_ops() {
  static constexpr DeviceOps table{
#define RZ_OP(name) .name = device::name,
#include "tensor/kernels/ops.inc"
#undef RZ_OP
      .optimizer = {device::adam, device::sgd, device::lion, device::adagrad, device::rmsprop,
                    device::decayed_step, device::muon_direction, device::lamb_moments, device::lamb,
                    device::read_sums, device::add_squares, device::add_exact, device::decide_step},
  };
  return table;
}

}  // namespace rz::ops
