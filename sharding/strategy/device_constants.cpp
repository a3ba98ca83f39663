#include "sharding/strategy/device_constants.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "comm/device/allocate.h"

namespace rz {

void DeviceConstants::write(const Optimizer& optimizer, std::span<const std::int64_t> missed,
                            const Stream& stream) {
  std::vector<std::byte> constants = optimizer.constants(0);
  stride_ = constants.size();
  if (!memory_.defined())
    memory_ = Tensor::empty({stride_ * (1 + missed.size())}, DType::u8, allocator_on(stream.device()));
  constants.resize(memory_.bytes());
  for (std::size_t m = 0; m < missed.size(); ++m)
    if (missed[m] != 0)
      std::ranges::copy(optimizer.constants(missed[m]), &constants[slot(missed[m], static_cast<int>(m))]);
  memory_.assign(constants, stream);
  written_ = true;
}

bool DeviceConstants::take_written() { return std::exchange(written_, false); }

std::size_t DeviceConstants::slot(std::int64_t missed, int first) const {
  return missed == 0 ? 0 : stride_ * (1 + static_cast<std::size_t>(first));
}

}  // namespace rz
