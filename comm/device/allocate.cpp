#include "comm/device/allocate.h"

#include <algorithm>
#include <new>

#include "comm/core/error.h"
#include "comm/device/cuda_runtime.h"
#include "comm/device/meta.h"

namespace rz {

using cuda::runtime;

std::shared_ptr<std::byte> allocate_on(Device device, std::size_t bytes) {
  if (is_meta(device)) return allocate_meta(bytes);
  if (device.kind == Device::host) return allocate_host(bytes);
  const cuda::DeviceGuard guard(device);
  void* memory = nullptr;
  const cuda::Status status = runtime().malloc(&memory, std::max<std::size_t>(bytes, 1));
  std::size_t free = 0, total = 0;
  if (status == cuda::out_of_memory && runtime().memory_info(&free, &total) == cuda::success)
    fail(Errc::system, "cannot allocate ", human_bytes(bytes), " on ", name(device), ": ", human_bytes(free),
         " of ", human_bytes(total), " are free; use smaller batches, a higher ZeRO stage or recomputation");
  cuda::check(status, "cudaMalloc", device);
  return {static_cast<std::byte*>(memory), [device](std::byte* p) {
            const cuda::DeviceGuard guard(device, std::nothrow);
            runtime().free(p);
          }};
}

Allocator allocator_on(Device device) {
  return {[device](std::size_t bytes) { return allocate_on(device, bytes); }, device};
}

std::shared_ptr<std::byte> allocate_pinned(Device device, std::size_t bytes) {
  const cuda::DeviceGuard guard(device);
  void* memory = nullptr;
  cuda::check(runtime().host_alloc(&memory, std::max<std::size_t>(bytes, 1)), "cudaHostAlloc", device);
  return {static_cast<std::byte*>(memory), [device](std::byte* p) {
            const cuda::DeviceGuard current(device, std::nothrow);
            runtime().host_free(p);
          }};
}

}  // namespace rz
