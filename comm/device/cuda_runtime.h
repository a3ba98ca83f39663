#pragma once
/// The CUDA runtime calls that ringzero makes, as one table: what a build with CUDA fills with NVIDIA's, a
/// build without it with nothing, and tests with an emulated device. No header of CUDA is needed to use it.
///
/// Handles (streams, events, graphs) are opaque pointers, as in CUDA's own interface; numbers of devices are
/// those of CUDA.

#include <cstddef>
#include <cstdint>
#include <new>
#include <string>
#include <string_view>

#include "comm/core/error.h"
#include "comm/core/types.h"

namespace rz::cuda {

/// A cudaError_t; 0 is success.
using Status = int;
inline constexpr Status success = 0, out_of_memory = 2, not_ready = 600;

struct Extent {
  unsigned x = 1, y = 1, z = 1;
  std::size_t count() const { return std::size_t{x} * y * z; }
};

/// How a kernel is spread: blocks of threads, and shared memory a block beyond what the kernel declares.
struct Grid {
  Extent blocks, threads;
  std::size_t shared_bytes = 0;
};

/// A kernel and its arguments, which live until the call returns.
struct KernelCall {
  const char* name;      ///< for error messages
  const void* function;  ///< what cudaLaunchKernel takes
  void** arguments;      ///< likewise
  /// The arguments as one trivially copyable object, and how to run one thread with them: for a device that
  /// is emulated on the host, null elsewhere.
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
  std::string uuid;  ///< 16 bytes: tells two ranks whether they share a card
};

struct IpcHandle {
  unsigned char bytes[64];
};

struct Runtime {
  Status (*get_device_count)(int*);
  Status (*get_device)(int*);
  Status (*set_device)(int);  ///< makes a context on the device, unless this process has one there
  Status (*has_context)(bool*, int device);
  Status (*get_properties)(DeviceProperties*, int device);
  Status (*device_synchronize)();
  Status (*memory_info)(std::size_t* free, std::size_t* total);

  Status (*malloc)(void**, std::size_t bytes);
  Status (*free)(void*);
  Status (*host_alloc)(void**, std::size_t bytes);  ///< pinned, mapped, usable by every device
  Status (*host_free)(void*);
  /// The device that owns a pointer; host memory of any kind is {host, 0}.
  Status (*get_owner)(Device*, const void*);
  Status (*memcpy_async)(void* to, const void* from, std::size_t bytes, void* stream);  ///< any direction
  Status (*memset_async)(void*, int value, std::size_t bytes, void* stream);

  Status (*stream_create)(void**, bool high_priority);  ///< does not wait for the null stream
  Status (*stream_destroy)(void*);
  Status (*stream_synchronize)(void*);
  Status (*stream_query)(void*);
  Status (*stream_wait_event)(void* stream, void* event);

  Status (*event_create)(void**, bool timing);
  Status (*event_destroy)(void*);
  Status (*event_record)(void* event, void* stream);
  Status (*event_query)(void*);
  Status (*event_synchronize)(void*);
  Status (*event_elapsed_ms)(float*, void* from, void* to);

  Status (*launch)(const KernelCall&, const Grid&, void* stream);
  /// Lets a kernel have more than 48 KiB of shared memory a block.
  Status (*allow_shared_bytes)(const void* function, std::size_t bytes);

  Status (*begin_capture)(void* stream);
  Status (*end_capture)(void* stream, void** graph);
  Status (*is_capturing)(void* stream, bool*);
  Status (*instantiate)(void** executable, void* graph);
  Status (*launch_graph)(void* executable, void* stream);
  Status (*destroy_graph)(void* graph);
  Status (*destroy_executable)(void* executable);

  Status (*can_access_peer)(bool*, int device, int peer);
  Status (*enable_peer_access)(int peer);  ///< for the current device; doing it twice is no error
  Status (*ipc_get_handle)(IpcHandle*, void* base);
  Status (*ipc_open_handle)(void** base, const IpcHandle&);
  Status (*ipc_close)(void* base);

  const char* (*error_name)(Status);  ///< "cudaErrorMemoryAllocation"
  const char* (*error_text)(Status);  ///< "out of memory"
};

/// Errc::unsupported in a build without CUDA.
const Runtime& runtime();

/// How many devices there are; 0 in a build without CUDA, and without a driver.
int device_count() noexcept;
/// Errc::config, one line that says how many devices there are, or that the build has no CUDA, unless
/// `device` is one of them.
void require_device(Device);

/// "host", "cuda:N", or "cuda" for this machine's devices in turn by `local_rank`. Errc::config for anything
/// else, and for a device that is not there.
Device device_from_name(std::string_view, int local_rank = 0);

/// Throws Errc::system unless success: "cudaMalloc on cuda:1: out of memory (cudaErrorMemoryAllocation)".
void check(Status, const char* call, Device);

/// Makes a device current in this thread for its lifetime, which every call needs that belongs to a device:
/// CUDA makes a context, some 500 MiB of the device's memory, on whichever one is current. Where this process
/// has no context on the device that was current before, that one is not made current again, for the same
/// reason.
class DeviceGuard {
 public:
  explicit DeviceGuard(Device);
  /// For destructors. A device that has failed may then not be current.
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
