#include "comm/device/stream.h"

#include <algorithm>
#include <bit>
#include <mutex>
#include <vector>

#include "comm/core/error.h"
#include "comm/device/allocate.h"
#include "comm/device/cuda_runtime.h"
#include "comm/device/meta.h"

namespace rz {

using cuda::DeviceGuard;
using cuda::runtime;

struct Event::Handle {
  explicit Handle(Device d) : device(d) {
    cuda::check(runtime().event_create(&native, false), "cudaEventCreate", device);
  }
  ~Handle() {
    const DeviceGuard guard(device, std::nothrow);
    runtime().event_destroy(native);
  }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  const Device device;
  void* native = nullptr;
};

bool Event::done() const {
  if (!handle_) return true;
  const DeviceGuard guard(handle_->device);
  const cuda::Status status = runtime().event_query(handle_->native);
  if (status != cuda::not_ready) cuda::check(status, "cudaEventQuery", handle_->device);
  return status == cuda::success;
}

void Event::synchronize() const {
  if (!handle_) return;
  const DeviceGuard guard(handle_->device);
  cuda::check(runtime().event_synchronize(handle_->native), "cudaEventSynchronize", handle_->device);
}

struct Stream::DeviceState {
  explicit DeviceState(Device d) : device(d) {}
  ~DeviceState() {
    blocks.clear();  // destroyed before the stream
    if (!owned) return;
    const DeviceGuard guard(device, std::nothrow);
    runtime().stream_destroy(owned);
  }
  DeviceState(const DeviceState&) = delete;
  DeviceState& operator=(const DeviceState&) = delete;

  const Device device;
  void* owned = nullptr;  // the stream; null if borrowed
  std::mutex mutex;
  std::vector<std::shared_ptr<std::byte>> blocks;  // scratch buffers; the last one is in use
  std::size_t bytes = 0;                           // size of the last block
};

Stream Stream::host(int threads, Reproducible reproducible) {
  Stream s;
  s.reproducible_ = reproducible;
  if (threads > 1)
    s.team_ = std::make_shared<ThreadTeam>(threads);
  else
    require(threads == 1, Errc::invalid_argument, "a host stream needs at least 1 thread, got ", threads);
  return s;
}

Stream Stream::create(Device device, Priority priority) {
  Stream s;
  if (is_meta(device)) s.device_ = device;
  if (device.kind == Device::host) return s;
  cuda::require_device(device);
  const DeviceGuard guard(device);
  s.device_ = device;
  s.device_state_ = std::make_shared<DeviceState>(device);
  cuda::check(runtime().stream_create(&s.native_, priority == Priority::high), "cudaStreamCreate", device);
  s.device_state_->owned = s.native_;
  return s;
}

Stream Stream::borrow(Device device, void* native) {
  if (device.kind == Device::host) {
    require(native == nullptr, Errc::invalid_argument, "a host stream has no native handle to borrow");
    return create(device);
  }
  cuda::require_device(device);
  Stream s;
  s.device_ = device;
  s.native_ = native;
  s.device_state_ = std::make_shared<DeviceState>(device);
  return s;
}

Event Stream::record() const {
  Event e;
  if (device_.kind == Device::host) return e;
  const DeviceGuard guard(device_);
  e.handle_ = std::make_shared<Event::Handle>(device_);
  cuda::check(runtime().event_record(e.handle_->native, native_), "cudaEventRecord", device_);
  return e;
}

void Stream::wait(const Event& event) const {
  if (!event.handle_) return;
  if (device_.kind == Device::host) return event.synchronize();
  const DeviceGuard guard(device_);
  cuda::check(runtime().stream_wait_event(native_, event.handle_->native), "cudaStreamWaitEvent", device_);
}

void Stream::synchronize() const {
  if (device_.kind == Device::host) return;
  const DeviceGuard guard(device_);
  cuda::check(runtime().stream_synchronize(native_), "cudaStreamSynchronize", device_);
}

bool Stream::capturing() const {
  if (device_.kind == Device::host) return false;
  const DeviceGuard guard(device_);
  bool is = false;
  cuda::check(runtime().is_capturing(native_, &is), "cudaStreamIsCapturing", device_);
  return is;
}

void* Stream::workspace(std::size_t bytes) const {
  require(device_.kind == Device::cuda, Errc::invalid_argument, "scratch memory of a host stream");
  DeviceState& own = *device_state_;
  const std::lock_guard lock(own.mutex);
  if (own.blocks.empty() || bytes > own.bytes) {
    const std::size_t larger = std::bit_ceil(std::max<std::size_t>(bytes, 4096));
    own.blocks.push_back(allocate_on(device_, larger));
    own.bytes = larger;
  }
  return own.blocks.back().get();
}

}  // namespace rz
