#include "comm/device/memory.h"

#include <cstring>

#include "comm/device/cuda_runtime.h"
#include "comm/device/meta.h"

namespace rz {

using cuda::runtime;

namespace {

/// Whether the stream must be idle before the copy: the driver waits for the stream's work with a lock that
/// other threads need (cuda::Runtime::memcpy_async).
bool needs_idle_stream(const void* to, const void* from, std::size_t bytes, Device device) {
  bool pageable = false;
  cuda::check(runtime().is_pageable(&pageable, to), "cudaPointerGetAttributes", device);
  if (!pageable && bytes > cuda::max_staged_bytes)
    cuda::check(runtime().is_pageable(&pageable, from), "cudaPointerGetAttributes", device);
  return pageable;
}

}  // namespace

void memcpy_async(void* to, const void* from, std::size_t bytes, const Stream& stream) {
  if (bytes == 0 || is_meta(stream.device())) return;
  if (stream.device().kind == Device::host) {
    std::memmove(to, from, bytes);
    return;
  }
  const cuda::DeviceGuard guard(stream.device());
  if (needs_idle_stream(to, from, bytes, stream.device())) stream.synchronize();
  cuda::check(runtime().memcpy_async(to, from, bytes, stream.native()), "cudaMemcpyAsync", stream.device());
}

void memset_async(void* to, int value, std::size_t bytes, const Stream& stream) {
  if (bytes == 0 || is_meta(stream.device())) return;
  if (stream.device().kind == Device::host) {
    std::memset(to, value, bytes);
    return;
  }
  const cuda::DeviceGuard guard(stream.device());
  cuda::check(runtime().memset_async(to, value, bytes, stream.native()), "cudaMemsetAsync", stream.device());
}

}  // namespace rz
