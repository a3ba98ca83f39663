#pragma once
/// Table of the CUDA runtime calls that ringzero makes. A build with CUDA fills it with NVIDIA's runtime;
/// tests with an emulated device; a build without CUDA has none. Using it requires no CUDA header.
///
/// Handles (streams, events, graphs) are opaque pointers as in CUDA. Device numbers are CUDA's.

#include <cstddef>
#include <cstdint>
#include <new>
#include <string>
#include <string_view>

#include "../core/error.h"
#include "../core/types.h"

namespace rz::cuda {

/// A cudaError_t; 0 is success.
using Status = int;
inline constexpr Status success = 0, out_of_memory = 2, not_ready = 600;

/// What the driver copies from pageable memory to a buffer of its own without waiting for the stream.
inline constexpr std::size_t max_staged_bytes = std::size_t{64} << 10;

struct Extent {
  unsigned x = 1, y = 1, z = 1;
  std::size_t count() const { return std::size_t{x} * y * z; }
};

/// Launch configuration: blocks, threads per block, and dynamic shared memory per block.
struct Grid {
  Extent blocks, threads;
  std::size_t shared_bytes = 0;
};

/// A kernel and its arguments, which stay valid until launch() returns.
struct KernelCall {
  const char* name;      ///< for error messages
  const void* function;  ///< as cudaLaunchKernel takes it
  void** arguments;      ///< as cudaLaunchKernel takes them
  /// The arguments as one trivially copyable object, and the function that runs one thread with them. Set for
  /// the emulated device, null otherwise.
  const void* packed;
  std::size_t packed_bytes;
  void (*run_thread)(const void* packed);
};

struct DeviceProperties {
  std::string name;
  int major = 0, minor = 0;  ///< compute capability
  int multiprocessors = 0;
  std::size_t memory_bytes = 0;
  std::size_t shared_bytes_per_block = 0;  ///< with opt-in
  int pci_domain = 0, pci_bus = 0, pci_device = 0;
  std::string uuid;  ///< 16 bytes; equal if two ranks share a GPU
};

struct IpcHandle {
  unsigned char bytes[64];
};

struct Runtime {
  Status (*get_device_count)(int*);
  Status (*get_device)(int*);
  Status (*set_device)(int);  ///< creates a context on the device if this process has none there
  Status (*has_context)(bool*, int device);
  Status (*get_properties)(DeviceProperties*, int device);
  Status (*memory_info)(std::size_t* free, std::size_t* total);

  Status (*malloc)(void**, std::size_t bytes);
  Status (*free)(void*);
  Status (*host_alloc)(void**, std::size_t bytes);  ///< pinned, mapped, usable by every device
  Status (*host_free)(void*);
  /// The device that owns a pointer; {host, 0} for any host memory.
  Status (*get_owner)(Device*, const void*);
  Status (*is_pageable)(bool*, const void*);  ///< host memory that is not pinned
  /// Any direction. Into pageable memory, and from more than max_staged_bytes of it, only in a stream whose
  /// work has ended: the driver waits for that work with a lock that keeps other threads of the process from
  /// creating events, streams and memory.
  Status (*memcpy_async)(void* to, const void* from, std::size_t bytes, void* stream);
  Status (*memset_async)(void*, int value, std::size_t bytes, void* stream);

  Status (*stream_create)(void**, bool high_priority);  ///< does not wait for the null stream
  Status (*stream_destroy)(void*);
  Status (*stream_synchronize)(void*);  ///< keeps no other thread from using the device
  Status (*stream_query)(void*);
  Status (*stream_wait_event)(void* stream, void* event);

  Status (*event_create)(void**, bool timing);
  Status (*event_destroy)(void*);
  Status (*event_record)(void* event, void* stream);
  Status (*event_query)(void*);
  Status (*event_synchronize)(void*);
  Status (*event_elapsed_ms)(float*, void* from, void* to);

  Status (*launch)(const KernelCall&, const Grid&, void* stream);
  /// Allows a kernel more than 48 KiB of dynamic shared memory per block.
  Status (*allow_shared_bytes)(const void* function, std::size_t bytes);

  Status (*begin_capture)(void* stream);
  Status (*end_capture)(void* stream, void** graph);
  Status (*is_capturing)(void* stream, bool*);
  Status (*instantiate)(void** executable, void* graph);
  Status (*launch_graph)(void* executable, void* stream);
  Status (*destroy_graph)(void* graph);
  Status (*destroy_executable)(void* executable);

  Status (*can_access_peer)(bool*, int device, int peer);
  Status (*enable_peer_access)(int peer);  ///< for the current device; enabling it twice is no error
  Status (*ipc_get_handle)(IpcHandle*, void* base);
  Status (*ipc_open_handle)(void** base, const IpcHandle&);
  Status (*ipc_close)(void* base);

  const char* (*error_name)(Status);  ///< "cudaErrorMemoryAllocation"
  const char* (*error_text)(Status);  ///< "out of memory"
};

/// The table. Errc::unsupported in a build without CUDA.
const Runtime& runtime();

/// Number of devices; 0 in a build without CUDA and without a driver.
int device_count() noexcept;
/// Errc::config unless `device` is the host or an existing device. The message has the number of devices, or
/// states that the build has no CUDA.
void require_device(Device);

/// Parses "host", "cuda:N" or "cuda", which selects device local_rank modulo the number of devices.
/// Errc::config for other text and for a missing device.
Device device_from_name(std::string_view, int local_rank = 0);

/// Throws Errc::system unless `status` is success, e.g. "cudaMalloc on cuda:1: out of memory
/// (cudaErrorMemoryAllocation)".
void check(Status, const char* call, Device);

/// Makes a device current in this thread for its lifetime. Required around every call that refers to a
/// device, since CUDA creates a context (about 500 MiB of device memory) on the current one. For the same
/// reason, the previous device is restored only if this process has a context there.
class DeviceGuard {
 public:
  explicit DeviceGuard(Device);
  /// For destructors: ignores errors. The device may then not be current.
  DeviceGuard(Device, std::nothrow_t) noexcept;
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  Status make_current(int device, const char** call);

  int previous_ = 0;
  bool restores_ = false;
};

}  // namespace rz::cuda
