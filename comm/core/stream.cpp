#include "comm/core/stream.h"

#include "comm/core/error.h"

namespace rz {

Stream Stream::host(int threads) {
  Stream s;
  if (threads > 1)
    s.team_ = std::make_shared<ThreadTeam>(threads);
  else
    require(threads == 1, Errc::invalid_argument, "a host stream needs at least 1 thread, got ", threads);
  return s;
}

Stream Stream::borrow(Device device, void* native) {
  require(device.kind == Device::host && native == nullptr, Errc::unsupported, "a stream of ", name(device),
          " needs a build with CUDA (-DRZ_CUDA=ON)");
  return {};
}

}  // namespace rz
