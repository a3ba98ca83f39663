// The table of CUDA calls, filled with NVIDIA's runtime.

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstring>

#include "comm/device/cuda_runtime.h"
#include "comm/os/wait_policy.h"

namespace rz::cuda {

namespace {

cudaStream_t stream_of(void* s) { return static_cast<cudaStream_t>(s); }
cudaEvent_t event_of(void* e) { return static_cast<cudaEvent_t>(e); }

Status get_properties(DeviceProperties* to, int device) {
  cudaDeviceProp p{};
  if (const auto status = cudaGetDeviceProperties(&p, device); status != cudaSuccess) return status;
  *to = {.name = p.name,
         .major = p.major,
         .minor = p.minor,
         .multiprocessors = p.multiProcessorCount,
         .memory_bytes = p.totalGlobalMem,
         .shared_bytes_per_block = p.sharedMemPerBlockOptin,
         .pci_domain = p.pciDomainID,
         .pci_bus = p.pciBusID,
         .pci_device = p.pciDeviceID,
         .uuid = std::string(p.uuid.bytes, sizeof p.uuid.bytes)};
  return cudaSuccess;
}

/// cuDevicePrimaryCtxGetState of the driver library, which the runtime has loaded. The runtime has no
/// equivalent that does not create a context.
using GetContextState = int (*)(int device, unsigned* flags, int* active);

Status has_context(bool* yes, int device) {
  static const auto get_state = [] {
    void* const driver = dlopen("libcuda.so.1", RTLD_LAZY);
    return driver ? reinterpret_cast<GetContextState>(dlsym(driver, "cuDevicePrimaryCtxGetState")) : nullptr;
  }();
  unsigned flags = 0;
  int active = 0;
  *yes = get_state && get_state(device, &flags, &active) == 0 && active;
  return cudaSuccess;
}

Status host_alloc(void** memory, std::size_t bytes) {
  return cudaHostAlloc(memory, bytes, cudaHostAllocPortable | cudaHostAllocMapped);
}

Status get_owner(Device* owner, const void* pointer) {
  cudaPointerAttributes a{};
  if (const auto status = cudaPointerGetAttributes(&a, pointer); status != cudaSuccess) return status;
  const bool on_device = a.type == cudaMemoryTypeDevice || a.type == cudaMemoryTypeManaged;
  *owner = on_device ? Device{Device::cuda, a.device} : Device{};
  return cudaSuccess;
}

Status is_pageable(bool* yes, const void* pointer) {
  cudaPointerAttributes a{};
  const auto status = cudaPointerGetAttributes(&a, pointer);
  *yes = a.type == cudaMemoryTypeUnregistered;
  return status;
}

Status stream_create(void** stream, bool high_priority) {
  int lowest = 0, highest = 0;
  if (const auto status = cudaDeviceGetStreamPriorityRange(&lowest, &highest); status != cudaSuccess)
    return status;
  return cudaStreamCreateWithPriority(reinterpret_cast<cudaStream_t*>(stream), cudaStreamNonBlocking,
                                      high_priority ? highest : lowest);
}

Status without_last_error(cudaError_t status) {
  if (status == cudaErrorNotReady) cudaGetLastError();  // otherwise a later call reports it
  return status;
}
Status stream_query(void* s) { return without_last_error(cudaStreamQuery(stream_of(s))); }
Status event_query(void* e) { return without_last_error(cudaEventQuery(event_of(e))); }

/// Polls: a call that waits in the driver may hold a lock that other threads need to create an event, a
/// stream or memory. A rank that is such a thread would not reach the collective that this one waits for.
template <class Query>
Status poll(const Query& query, void* handle) {
  Status status = query(handle);
  for (unsigned polls = 0; status == not_ready; ++polls) {
    short_backoff.wait(polls);
    status = query(handle);
  }
  return status;
}

Status event_create(void** event, bool timing) {
  return cudaEventCreateWithFlags(reinterpret_cast<cudaEvent_t*>(event),
                                  timing ? cudaEventDefault : cudaEventDisableTiming);
}

Status launch(const KernelCall& call, const Grid& grid, void* stream) {
  const dim3 blocks(grid.blocks.x, grid.blocks.y, grid.blocks.z);
  const dim3 threads(grid.threads.x, grid.threads.y, grid.threads.z);
  return cudaLaunchKernel(call.function, blocks, threads, call.arguments, grid.shared_bytes,
                          stream_of(stream));
}

Status allow_shared_bytes(const void* function, std::size_t bytes) {
  return cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
}

Status is_capturing(void* stream, bool* yes) {
  cudaStreamCaptureStatus state{};
  const auto status = cudaStreamIsCapturing(stream_of(stream), &state);
  *yes = state != cudaStreamCaptureStatusNone;
  return status;
}

Status can_access_peer(bool* yes, int device, int peer) {
  int can = 0;
  const auto status = cudaDeviceCanAccessPeer(&can, device, peer);
  *yes = can != 0;
  return status;
}

Status enable_peer_access(int peer) {
  const auto status = cudaDeviceEnablePeerAccess(peer, 0);
  if (status != cudaErrorPeerAccessAlreadyEnabled) return status;
  cudaGetLastError();  // otherwise a later call reports it
  return cudaSuccess;
}

Status ipc_get_handle(IpcHandle* handle, void* base) {
  static_assert(sizeof(handle->bytes) == sizeof(cudaIpcMemHandle_t));
  cudaIpcMemHandle_t native{};
  const auto status = cudaIpcGetMemHandle(&native, base);
  std::memcpy(handle->bytes, &native, sizeof native);
  return status;
}

Status ipc_open_handle(void** base, const IpcHandle& handle) {
  cudaIpcMemHandle_t native{};
  std::memcpy(&native, handle.bytes, sizeof native);
  return cudaIpcOpenMemHandle(base, native, cudaIpcMemLazyEnablePeerAccess);
}

const Runtime table{
    .get_device_count = [](int* count) -> Status { return cudaGetDeviceCount(count); },
    .get_device = [](int* device) -> Status { return cudaGetDevice(device); },
    .set_device = [](int device) -> Status { return cudaSetDevice(device); },
    .has_context = has_context,
    .get_properties = get_properties,
    .memory_info = [](std::size_t* free, std::size_t* total) -> Status {
      return cudaMemGetInfo(free, total);
    },

    .malloc = [](void** memory, std::size_t bytes) -> Status { return cudaMalloc(memory, bytes); },
    .free = [](void* memory) -> Status { return cudaFree(memory); },
    .host_alloc = host_alloc,
    .host_free = [](void* memory) -> Status { return cudaFreeHost(memory); },
    .get_owner = get_owner,
    .is_pageable = is_pageable,
    .memcpy_async = [](void* to, const void* from, std::size_t bytes, void* stream) -> Status {
      return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_of(stream));
    },
    .memset_async = [](void* to, int value, std::size_t bytes, void* stream) -> Status {
      return cudaMemsetAsync(to, value, bytes, stream_of(stream));
    },

    .stream_create = stream_create,
    .stream_destroy = [](void* s) -> Status { return cudaStreamDestroy(stream_of(s)); },
    .stream_synchronize = [](void* s) -> Status { return poll(stream_query, s); },
    .stream_query = stream_query,
    .stream_wait_event = [](void* s, void* e) -> Status {
      return cudaStreamWaitEvent(stream_of(s), event_of(e), 0);
    },

    .event_create = event_create,
    .event_destroy = [](void* e) -> Status { return cudaEventDestroy(event_of(e)); },
    .event_record = [](void* e, void* s) -> Status { return cudaEventRecord(event_of(e), stream_of(s)); },
    .event_query = event_query,
    .event_synchronize = [](void* e) -> Status { return poll(event_query, e); },
    .event_elapsed_ms = [](float* ms, void* from, void* to) -> Status {
      return cudaEventElapsedTime(ms, event_of(from), event_of(to));
    },

    .launch = launch,
    .allow_shared_bytes = allow_shared_bytes,

    .begin_capture = [](void* s) -> Status {
      return cudaStreamBeginCapture(stream_of(s), cudaStreamCaptureModeThreadLocal);
    },
    .end_capture = [](void* s, void** graph) -> Status {
      return cudaStreamEndCapture(stream_of(s), reinterpret_cast<cudaGraph_t*>(graph));
    },
    .is_capturing = is_capturing,
    .instantiate = [](void** executable, void* graph) -> Status {
      return cudaGraphInstantiate(reinterpret_cast<cudaGraphExec_t*>(executable),
                                  static_cast<cudaGraph_t>(graph), 0);
    },
    .launch_graph = [](void* executable, void* s) -> Status {
      return cudaGraphLaunch(static_cast<cudaGraphExec_t>(executable), stream_of(s));
    },
    .destroy_graph = [](void* g) -> Status { return cudaGraphDestroy(static_cast<cudaGraph_t>(g)); },
    .destroy_executable = [](void* e) -> Status {
      return cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(e));
    },

    .can_access_peer = can_access_peer,
    .enable_peer_access = enable_peer_access,
    .ipc_get_handle = ipc_get_handle,
    .ipc_open_handle = ipc_open_handle,
    .ipc_close = [](void* base) -> Status { return cudaIpcCloseMemHandle(base); },

    .error_name = [](Status s) { return cudaGetErrorName(static_cast<cudaError_t>(s)); },
    .error_text = [](Status s) { return cudaGetErrorString(static_cast<cudaError_t>(s)); },
};

}  // namespace

const Runtime& runtime() { return table; }

}  // namespace rz::cuda
