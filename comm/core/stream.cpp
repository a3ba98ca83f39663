#include "comm/core/stream.h"

#include "comm/core/cuda/runtime.h"
#include "comm/core/error.h"

namespace rz {

using cuda::DeviceGuard;
using cuda::runtime;

struct Event::Handle {
  explicit Handle(Device d) : device(d) {
    cuda::check(runtime().event_create(&native, false), "cudaEventCreate", device);
  }
  ~Handle() { runtime().event_destroy(native); }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  const Device device;
  void* native = nullptr;
};

bool Event::done() const {
  if (!handle_) return true;
  const cuda::Status status = runtime().event_query(handle_->native);
  if (status != cuda::not_ready) cuda::check(status, "cudaEventQuery", handle_->device);
  return status == cuda::success;
}

void Event::synchronize() const {
  if (handle_)
    cuda::check(runtime().event_synchronize(handle_->native), "cudaEventSynchronize", handle_->device);
}

struct Stream::Owned {
  explicit Owned(void* s) : native(s) {}
  ~Owned() { runtime().stream_destroy(native); }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;

  void* native;
};

Stream Stream::host(int threads) {
  Stream s;
  if (threads > 1)
    s.team_ = std::make_shared<ThreadTeam>(threads);
  else
    require(threads == 1, Errc::invalid_argument, "a host stream needs at least 1 thread, got ", threads);
  return s;
}

Stream Stream::create(Device device, Priority priority) {
  if (device.kind == Device::host) return {};
  cuda::require_device(device);
  const DeviceGuard guard(device);
  Stream s;
  s.device_ = device;
  cuda::check(runtime().stream_create(&s.native_, priority == Priority::high), "cudaStreamCreate", device);
  s.owned_ = std::make_shared<Owned>(s.native_);
  return s;
}

Stream Stream::borrow(Device device, void* native) {
  if (device.kind == Device::host) {
    require(native == nullptr, Errc::invalid_argument, "a host stream has no native handle to borrow");
    return {};
  }
  cuda::require_device(device);
  Stream s;
  s.device_ = device;
  s.native_ = native;
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

}  // namespace rz
