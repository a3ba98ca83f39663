#include "comm/device/allocate.h"

#include <algorithm>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "comm/core/error.h"
#include "comm/device/cuda_runtime.h"
#include "comm/device/meta.h"
#include "comm/os/process.h"

namespace rz {

using cuda::runtime;

namespace {

struct FreedMemory {
  Device device;
  void* memory;
  cuda::Status (*free)(void*);
};

constinit ProcessMutex deferring;
constinit int deferrals = 0;  // objects of DeferredFrees
/// Never destroyed, since threads may outlive static objects.
constinit std::vector<FreedMemory>* deferred = nullptr;

void return_to_driver(const FreedMemory& m) {
  const cuda::DeviceGuard guard(m.device, std::nothrow);
  m.free(m.memory);
}

void free_or_defer(const FreedMemory& m) {
  {
    const std::lock_guard lock(deferring);
    if (deferrals > 0) return deferred->push_back(m);
  }
  return_to_driver(m);
}

/// Returns whether there was any.
bool return_deferred() {
  std::vector<FreedMemory> all;
  {
    const std::lock_guard lock(deferring);
    if (deferred) all.swap(*deferred);
  }
  for (const FreedMemory& m : all) return_to_driver(m);
  return !all.empty();
}

/// `allocate`, once more if memory runs out that deferred frees can give back.
template <class Allocate>
cuda::Status allocate_or_return_deferred(const Allocate& allocate) {
  const cuda::Status status = allocate();
  return status == cuda::out_of_memory && return_deferred() ? allocate() : status;
}

}  // namespace

DeferredFrees::DeferredFrees() {
  const std::lock_guard lock(deferring);
  if (!deferred) deferred = new std::vector<FreedMemory>();
  ++deferrals;
}

DeferredFrees::~DeferredFrees() {
  {
    const std::lock_guard lock(deferring);
    if (--deferrals > 0) return;
  }
  return_deferred();
}

std::shared_ptr<std::byte> allocate_on(Device device, std::size_t bytes) {
  if (is_meta(device)) return allocate_meta(bytes);
  if (device.kind == Device::host) return allocate_host(bytes);
  const cuda::DeviceGuard guard(device);
  void* memory = nullptr;
  const cuda::Status status =
      allocate_or_return_deferred([&] { return runtime().malloc(&memory, std::max<std::size_t>(bytes, 1)); });
  std::size_t free = 0, total = 0;
  if (status == cuda::out_of_memory && runtime().memory_info(&free, &total) == cuda::success)
    fail(Errc::system, "cannot allocate ", human_bytes(bytes), " on ", name(device), ": ", human_bytes(free),
         " of ", human_bytes(total), " are free; use smaller batches, a higher ZeRO stage or recomputation");
  cuda::check(status, "cudaMalloc", device);
  return {static_cast<std::byte*>(memory), [device](std::byte* p) {
            free_or_defer({device, p, runtime().free});
          }};
}

Allocator allocator_on(Device device) {
  return {[device](std::size_t bytes) { return allocate_on(device, bytes); }, device};
}

std::shared_ptr<std::byte> allocate_pinned(Device device, std::size_t bytes) {
  const cuda::DeviceGuard guard(device);
  void* memory = nullptr;
  cuda::check(allocate_or_return_deferred(
                  [&] { return runtime().host_alloc(&memory, std::max<std::size_t>(bytes, 1)); }),
              "cudaHostAlloc", device);
  return {static_cast<std::byte*>(memory), [device](std::byte* p) {
            free_or_defer({device, p, runtime().host_free});
          }};
}

}  // namespace rz
