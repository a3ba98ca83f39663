// The table of CUDA calls, implemented by the emulated devices. Misuse returns the same errors as CUDA.

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <shared_mutex>
#include <string>
#include <thread>
#include <utility>

#include "comm/device/cuda_runtime.h"
#include "tests/emulated_gpu/device_memory.h"
#include "tests/emulated_gpu/emulated_gpu.h"
#include "tests/emulated_gpu/ipc.h"
#include "tests/emulated_gpu/machine.h"

namespace rz::emulated {

namespace {

using cuda::Status;
using cuda::success;

enum : Status {
  invalid_value = 1,
  invalid_device = 101,
  device_uninitialized = 201,
  already_mapped = 208,
  invalid_handle = 400,
  launch_failure = 719,
  unsupported_in_capture = 900,
  invalidated_capture = 901,
};

thread_local int current_device = 0;

/// A bit per device.
std::atomic<unsigned> context_bits{0};
void use_context(int device = current_device) { context_bits |= 1u << device; }

std::atomic<std::size_t> kernels_launched{0};

// ---- injected failures

struct Faults {
  struct Fault {
    Status status;
    int after;
  };
  std::mutex mutex;
  std::map<std::string, Fault> pending;

  Status next(const char* name) {
    const std::lock_guard lock(mutex);
    const auto it = pending.find(name);
    if (it == pending.end() || it->second.after-- > 0) return success;
    const Status status = it->second.status;
    pending.erase(it);
    return status;
  }
};

Faults& faults() {
  static auto* const all = new Faults();
  return *all;
}

Machine& machine() { return Machine::instance(); }
DeviceMemory& memory() { return DeviceMemory::instance(); }

Stream* stream_of(void* s) { return s ? static_cast<Stream*>(s) : machine().null_stream(current_device); }
EventHandle& event_of(void* e) { return *static_cast<EventHandle*>(e); }

/// Faults injected into a call before it does anything.
Status entry(const char* name) {
  use_context();
  if (const Status status = faults().next(name)) return status;
  return machine().failure().empty() ? success : launch_failure;
}

Status ending(bool well) { return well ? success : launch_failure; }

// ---- devices

/// `devices`, or fewer by RZ_EMULATED_DEVICES: with 1, ranks that are threads share a device.
int device_count() {
  const char* const fewer = std::getenv("RZ_EMULATED_DEVICES");
  return fewer ? std::clamp(std::atoi(fewer), 1, devices) : devices;
}

Status get_device_count(int* count) {
  *count = device_count();
  return faults().next("get_device_count");
}

Status set_device(int device) {
  if (device < 0 || device >= device_count()) return invalid_device;
  current_device = device;
  use_context();
  return success;
}

Status has_context(bool* yes, int device) {
  if (device < 0 || device >= devices) return invalid_device;
  *yes = (context_bits >> device & 1) != 0;
  return success;
}

Status get_properties(cuda::DeviceProperties* to, int device) {
  if (device < 0 || device >= devices) return invalid_device;
  *to = {.name = "emulated device",
         .major = 9,
         .minor = 0,
         .multiprocessors = 2,
         .memory_bytes = memory().capacity,
         .shared_bytes_per_block = 227 << 10,
         .pci_domain = 0,
         .pci_bus = device + 1,
         .pci_device = 0,
         .uuid = "emulated device" + std::string(1, static_cast<char>('0' + device))};
  return success;
}

// ---- memory

Status malloc(void** to, std::size_t bytes) {
  if (const Status status = entry("malloc")) return status;
  if (Machine::thread_captures()) return unsupported_in_capture;
  *to = memory().allocate(current_device, bytes);
  return *to ? success : cuda::out_of_memory;
}

/// Held alone by calls that wait for a device: as in CUDA, no thread launches anything there meanwhile.
std::shared_mutex launching[devices];

/// Waits for the memory's device, as CUDA does.
Status free(void* p) {
  if (const Status status = entry("free")) return p ? (memory().free(p), status) : status;
  if (!p) return success;
  if (Machine::thread_captures()) return unsupported_in_capture;
  const int device = memory().owner(p).device;
  const std::lock_guard alone(launching[device]);
  const bool well = machine().synchronize_device(device);
  if (!memory().free(p)) return invalid_value;
  return ending(well);
}

Status host_alloc(void** to, std::size_t bytes) {
  if (const Status status = entry("host_alloc")) return status;
  *to = memory().allocate_pinned(bytes);
  return *to ? success : cuda::out_of_memory;
}

Status host_free(void* p) {
  use_context();
  const std::lock_guard alone(launching[current_device]);
  machine().synchronize_device(current_device);
  return memory().free_pinned(p) ? success : invalid_value;
}

Status get_owner(Device* owner, const void* p) {
  const auto o = memory().owner(p);
  *owner = o.on_device ? Device{Device::cuda, o.device} : Device{};
  return success;
}

Status is_pageable(bool* yes, const void* p) {
  const auto o = memory().owner(p);
  *yes = !o.on_device && !o.pinned;
  return success;
}

bool inside(const DeviceMemory::Owner& o, std::size_t bytes) {
  return !(o.on_device || o.pinned) || bytes <= o.bytes - o.offset;
}

MakeWork copy_work(void* to, const void* from, std::size_t bytes, std::shared_ptr<std::string> staged,
                   int device) {
  return [=](std::uint64_t) -> Work {
    return [=] {
      GridRun::describe("a copy of %zu bytes to %p from %p on cuda:%d", bytes, to, from, device);
      std::memmove(to, staged ? staged->data() : from, bytes);
      return Progress::done;
    };
  };
}

/// Ordinary host memory is read at once and written before the call returns, as in CUDA; device and pinned
/// memory when the stream reaches the task. A copy that CUDA's driver would wait for with a lock is a failure
/// of the test.
Status memcpy_async(void* to, const void* from, std::size_t bytes, void* s) {
  if (const Status status = entry("memcpy_async")) return status;
  const std::shared_lock beside_others(launching[stream_of(s)->device]);
  const auto source = memory().owner(from), target = memory().owner(to);
  if (!inside(source, bytes) || !inside(target, bytes)) return invalid_value;
  const bool pageable_source = !source.on_device && !source.pinned;
  const bool pageable_target = !target.on_device && !target.pinned;
  if ((pageable_source || pageable_target) && machine().capturing(stream_of(s)))
    return unsupported_in_capture;
  if (pageable_target || (pageable_source && bytes > cuda::max_staged_bytes)) {
    EXPECT_TRUE(machine().idle(stream_of(s)) || !machine().failure().empty())
        << "a copy of " << bytes
        << " bytes of pageable memory waits for its stream, and other threads for it";
  }
  std::shared_ptr<std::string> staged;
  if (pageable_source) staged = std::make_shared<std::string>(static_cast<const char*>(from), bytes);
  machine().submit(stream_of(s), copy_work(to, from, bytes, staged, stream_of(s)->device));
  return pageable_target ? ending(machine().synchronize(stream_of(s))) : success;
}

Status memset_async(void* to, int value, std::size_t bytes, void* s) {
  if (const Status status = entry("memset_async")) return status;
  const std::shared_lock beside_others(launching[stream_of(s)->device]);
  if (!memory().owner(to).on_device || !inside(memory().owner(to), bytes)) return invalid_value;
  machine().submit(stream_of(s), [=](std::uint64_t) -> Work {
    return [=] {
      GridRun::describe("a memset of %zu bytes at %p", bytes, to);
      std::memset(to, value, bytes);
      return Progress::done;
    };
  });
  return success;
}

// ---- streams and events

Status stream_synchronize(void* s) {
  if (const Status status = entry("stream_synchronize")) return status;
  if (machine().capturing(stream_of(s)) || Machine::thread_captures()) return unsupported_in_capture;
  return ending(machine().synchronize(stream_of(s)));
}

Status stream_query(void* s) {
  if (const Status status = entry("stream_query")) return status;
  if (machine().capturing(stream_of(s)) || Machine::thread_captures()) return unsupported_in_capture;
  return machine().idle(stream_of(s)) ? success : cuda::not_ready;
}

Status event_record(void* e, void* s) {
  if (const Status status = entry("event_record")) return status;
  if (s && static_cast<Stream*>(s)->device != current_device) return invalid_handle;
  machine().record(stream_of(s), event_of(e));
  return success;
}

Status event_query(void* e) {
  if (const Status status = entry("event_query")) return status;
  // A capturing thread must not query any event, and no thread one that is being captured.
  if (Machine::thread_captures() || machine().capturing_into(event_of(e))) return unsupported_in_capture;
  const bool reached = machine().reached(event_of(e));
  if (!machine().failure().empty()) return launch_failure;
  return reached ? success : cuda::not_ready;
}

Status event_synchronize(void* e) {
  if (const Status status = entry("event_synchronize")) return status;
  if (Machine::thread_captures()) return unsupported_in_capture;
  return ending(machine().synchronize(event_of(e)));
}

// ---- kernels

Status launch(const cuda::KernelCall& call, const cuda::Grid& grid, void* s) {
  if (const Status status = entry("launch")) return status;
  const std::shared_lock beside_others(launching[stream_of(s)->device]);
  if (grid.threads.count() > 1024 || grid.threads.z > 64 || grid.blocks.y > 65535 || grid.blocks.z > 65535 ||
      grid.shared_bytes > 227 << 10 || !call.run_thread)
    return invalid_value;
  if (s && static_cast<Stream*>(s)->device != current_device) return invalid_handle;
  const auto arguments =
      std::make_shared<std::string>(static_cast<const char*>(call.packed), call.packed_bytes);
  ++kernels_launched;
  machine().submit(stream_of(s), [call, grid, arguments](std::uint64_t random) -> Work {
    cuda::KernelCall mine = call;
    mine.packed = arguments->data();
    auto run = std::make_shared<GridRun>(mine, grid, random);
    // A few blocks at a time, so that kernels of several streams interleave.
    return [run, turn = 1 + random % 64] { return run->run(turn); };
  });
  return success;
}

// ---- graphs

Status end_capture(void* s, void** graph) {
  use_context();
  auto captured = machine().end_capture(stream_of(s));
  if (!captured) return invalidated_capture;
  *graph = captured.release();
  return success;
}

Status instantiate(void** executable, void* graph) {
  use_context();
  *executable = new std::shared_ptr<const Graph>(std::make_shared<Graph>(*static_cast<Graph*>(graph)));
  return success;
}

Status launch_graph(void* executable, void* s) {
  if (const Status status = entry("launch_graph")) return status;
  const std::shared_lock beside_others(launching[stream_of(s)->device]);
  machine().submit(stream_of(s), replay(*static_cast<std::shared_ptr<const Graph>*>(executable)));
  return success;
}

// ---- peers: threads of this process need no handles

Status ipc_get_handle(cuda::IpcHandle* handle, void* base) {
  if (const Status status = entry("ipc_get_handle")) return status;
  IpcPlace place{};
  static_assert(sizeof place <= sizeof handle->bytes);
  if (!memory().share(base, place)) return invalid_value;
  *handle = {};
  std::memcpy(handle->bytes, &place, sizeof place);
  return success;
}

/// Memory of other processes, and the device that was current when it was opened.
struct Opened {
  std::mutex mutex;
  std::map<const void*, int> on;
  std::set<std::string> in_progress;  // handles
};
Opened& opened() {
  static auto* const all = new Opened();
  return *all;
}

/// CUDA opens no handle in the process that made it, and none in two threads at once.
Status ipc_open_handle(void** base, const cuda::IpcHandle& handle) {
  if (const Status status = entry("ipc_open_handle")) return status;
  if (Machine::thread_captures()) return unsupported_in_capture;
  IpcPlace place{};
  std::memcpy(&place, handle.bytes, sizeof place);
  if (place.process == getpid()) return device_uninitialized;
  const std::string name(reinterpret_cast<const char*>(handle.bytes), sizeof place);
  {
    const std::lock_guard lock(opened().mutex);
    if (!opened().in_progress.insert(name).second) return already_mapped;
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(1));  // as long as CUDA takes
  *base = memory().open_shared(place);
  const std::lock_guard lock(opened().mutex);
  opened().in_progress.erase(name);
  if (!*base) return invalid_value;
  opened().on[*base] = current_device;
  return success;
}

/// As CUDA: in the context in which it was opened.
Status ipc_close(void* base) {
  {
    const std::lock_guard lock(opened().mutex);
    if (const auto it = opened().on.find(base); it != opened().on.end()) {
      EXPECT_EQ(it->second, current_device) << "memory was opened on one device and closed on another";
      opened().on.erase(it);
    }
  }
  if (const Status status = entry("ipc_close")) return memory().close_shared(base), status;
  return memory().close_shared(base) ? success : Status{invalid_value};
}

const char* error_name(Status s) {
  switch (s) {
    case cuda::out_of_memory:
      return "cudaErrorMemoryAllocation";
    case invalid_device:
      return "cudaErrorInvalidDevice";
    case device_uninitialized:
      return "cudaErrorDeviceUninitialized";
    case already_mapped:
      return "cudaErrorAlreadyMapped";
    case invalid_handle:
      return "cudaErrorInvalidResourceHandle";
    case launch_failure:
      return "cudaErrorLaunchFailure";
    case unsupported_in_capture:
      return "cudaErrorStreamCaptureUnsupported";
    case invalidated_capture:
      return "cudaErrorStreamCaptureInvalidated";
    default:
      return s == invalid_value ? "cudaErrorInvalidValue" : "cudaError";
  }
}

const char* error_text(Status s) {
  thread_local std::string text;
  text = s == launch_failure ? machine().failure() : "";
  if (s == cuda::out_of_memory) text = "out of memory";
  return text.empty() ? "the emulated device refused it" : text.c_str();
}

const cuda::Runtime table{
    .get_device_count = get_device_count,
    .get_device = [](int* device) -> Status { return *device = current_device, success; },
    .set_device = set_device,
    .has_context = has_context,
    .get_properties = get_properties,
    .memory_info = [](std::size_t* free, std::size_t* total) -> Status {
      use_context();
      *total = memory().capacity;
      *free = *total - memory().in_use(current_device);
      return success;
    },

    .malloc = malloc,
    .free = free,
    .host_alloc = host_alloc,
    .host_free = host_free,
    .get_owner = get_owner,
    .is_pageable = is_pageable,
    .memcpy_async = memcpy_async,
    .memset_async = memset_async,

    .stream_create = [](void** s, bool) -> Status {
      *s = machine().create_stream(current_device);
      return entry("stream_create");
    },
    .stream_destroy = [](void* s) -> Status {
      return use_context(), machine().destroy_stream(stream_of(s)), success;
    },
    .stream_synchronize = stream_synchronize,
    .stream_query = stream_query,
    .stream_wait_event = [](void* s, void* e) -> Status {
      return machine().wait(stream_of(s), event_of(e)), entry("stream_wait_event");
    },

    .event_create = [](void** e, bool) -> Status {
      *e = new EventHandle(std::make_shared<EventState>());
      return entry("event_create");
    },
    .event_destroy = [](void* e) -> Status {
      return use_context(), delete static_cast<EventHandle*>(e), success;
    },
    .event_record = event_record,
    .event_query = event_query,
    .event_synchronize = event_synchronize,
    .event_elapsed_ms = [](float* ms, void* from, void* to) -> Status {
      use_context();
      *ms = std::chrono::duration<float, std::milli>(event_of(to)->when - event_of(from)->when).count();
      return success;
    },

    .launch = launch,
    .allow_shared_bytes = [](const void*, std::size_t bytes) -> Status {
      use_context();
      return bytes > 227 << 10 ? Status{invalid_value} : success;
    },

    .begin_capture = [](void* s) -> Status {
      use_context();
      return machine().begin_capture(stream_of(s)) ? success : Status{unsupported_in_capture};
    },
    .end_capture = end_capture,
    .is_capturing = [](void* s, bool* yes) -> Status {
      return use_context(), *yes = machine().capturing(stream_of(s)), success;
    },
    .instantiate = instantiate,
    .launch_graph = launch_graph,
    .destroy_graph = [](void* g) -> Status { return use_context(), delete static_cast<Graph*>(g), success; },
    .destroy_executable = [](void* e) -> Status {
      return use_context(), delete static_cast<std::shared_ptr<const Graph>*>(e), success;
    },

    .can_access_peer = [](bool* yes, int, int) -> Status { return *yes = true, success; },
    .enable_peer_access = [](int peer) -> Status {
      if (peer >= devices) return invalid_device;
      use_context();
      use_context(peer);  // whose memory is then reached
      return success;
    },
    .ipc_get_handle = ipc_get_handle,
    .ipc_open_handle = ipc_open_handle,
    .ipc_close = ipc_close,

    .error_name = error_name,
    .error_text = error_text,
};

}  // namespace

void fail_call(const std::string& name, Status status, int after) {
  const std::lock_guard lock(faults().mutex);
  faults().pending[name] = {status, after};
}

std::set<int> contexts() {
  std::set<int> all;
  for (int d = 0; d < devices; ++d)
    if (context_bits >> d & 1) all.insert(d);
  return all;
}

void reset_contexts() { context_bits = 0; }

std::size_t streams(int device) { return machine().streams(device); }

std::size_t launches() { return kernels_launched; }

void set_patience(std::chrono::milliseconds patience) { machine().patience = patience; }

std::size_t bytes_in_use() {
  std::size_t bytes = 0;
  for (int d = 0; d < devices; ++d) bytes += memory().in_use(d);
  return bytes;
}

std::size_t places_of(std::string_view bytes) { return memory().places_of(bytes); }

void set_capacity(std::size_t bytes) { memory().capacity = bytes; }

Schedule::Schedule(std::uint64_t seed, Pace pace) : bytes_before_(bytes_in_use()) {
  machine().restart(seed, static_cast<Machine::Pace>(pace));
}

Schedule::~Schedule() {
  EXPECT_EQ(machine().pending(), 0u) << "tasks that were not waited for";
  machine().restart(1, Machine::Pace::eager);
  EXPECT_EQ(bytes_in_use(), bytes_before_) << "device memory was not given back";
}

}  // namespace rz::emulated

namespace rz::cuda {
const Runtime& runtime() { return emulated::table; }
}  // namespace rz::cuda
