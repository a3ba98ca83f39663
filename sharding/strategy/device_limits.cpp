#include "sharding/strategy/device_limits.h"

#include <cstddef>
#include <span>

#include "comm/core/error.h"
#include "comm/device/allocate.h"

namespace rz {

void DeviceLimits::write(const UpdateWords& words, const Stream& stream) {
  if (written_ == words) return;
  require(!stream.capturing(), Errc::invalid_argument,
          "loss scale, expected terms or policy changed in an update that is captured in a graph; call "
          "next_update() after a change");
  if (!memory_.defined())
    memory_ = Tensor::empty({sizeof(UpdateWords)}, DType::u8, allocator_on(stream.device()));
  memory_.assign(std::as_bytes(std::span(&words, 1)), stream);
  written_ = words;
}

const StepLimits* DeviceLimits::limits() const {
  return reinterpret_cast<const StepLimits*>(memory_.raw() + offsetof(UpdateWords, limits));
}

Tensor DeviceLimits::loss_gradient() const {
  return Tensor::borrow(memory_.raw() + offsetof(UpdateWords, loss_gradient), {}, DType::f32,
                        memory_.device());
}

}  // namespace rz
