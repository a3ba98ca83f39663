#include "sharding/model/offload.h"

#include "comm/core/error.h"
#include "comm/device/allocate.h"

namespace rz {

const char* name(OffloadDevice device) { return device == OffloadDevice::none ? "none" : "cpu"; }

void check(const OffloadOptions& options, const char* key) {
  require(options.ratio >= 0 && options.ratio <= 1, Errc::invalid_argument, key, ": ratio is ", options.ratio,
          ", expected 0 to 1");
}

Allocator offload_allocator(const OffloadOptions& options, Device device) {
  if (!options.pin_memory) return allocate_host;
  return [device](std::size_t bytes) { return allocate_pinned(device, bytes); };
}

void require_may_copy(const OffloadOptions& options, const Stream& stream) {
  require(options.pin_memory || !stream.capturing(), Errc::unsupported,
          "offloaded memory that is not pinned cannot be copied in a graph; set pin_memory, or run without "
          "graphs");
}

}  // namespace rz
