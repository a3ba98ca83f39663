#include "comm/backends/peer_cuda/peer_arenas.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <mutex>
#include <optional>
#include <thread>

#include "comm/core/deadline.h"
#include "comm/core/error.h"
#include "comm/device/cuda_runtime.h"
#include "comm/os/process.h"
#include "comm/os/wait_policy.h"

namespace rz {

namespace {

using cuda::runtime;

using Memory = std::shared_ptr<std::byte>;

/// Exchanged by map_peers(): how peers reach a rank's memory.
struct MemoryHandle {
  std::uint64_t owner = 0;  ///< address of its shared_ptr, valid in its process; 0: no memory
  cuda::IpcHandle handle{};
};

MemoryHandle export_memory(const Memory& memory, Device device, bool one_process) {
  if (!memory) return {};
  MemoryHandle own_handle{.owner = reinterpret_cast<std::uint64_t>(&memory)};
  if (one_process) return own_handle;
  const cuda::DeviceGuard guard(device);
  cuda::check(runtime().ipc_get_handle(&own_handle.handle, memory.get()), "cudaIpcGetMemHandle", device);
  return own_handle;
}

/// Memory that peers may have mapped. Leaked unless release() is called after all peers have unmapped it or
/// mapping has succeeded.
class ExportedMemory {
 public:
  explicit ExportedMemory(Memory memory) : memory_(std::move(memory)) {}
  ~ExportedMemory() {
    if (memory_) static_cast<void>(new Memory(std::move(memory_)));
  }
  ExportedMemory(const ExportedMemory&) = delete;
  ExportedMemory& operator=(const ExportedMemory&) = delete;
  void release() { memory_.reset(); }

 private:
  Memory memory_;
};

/// Runs f and keeps its error if it is the first.
template <class F>
void keep_first_error(std::optional<Error>& problem, const F& f) {
  try {
    f();
  } catch (const Error& e) {
    if (!problem) problem = e;
  }
}

void host_barrier(Backend& host) {
  const CollectiveCall op{.kind = Collective::barrier};
  host.submit({&op, 1}).wait();
}

/// Blocks that can be resident for every rank at once. A collective kernel has at most one block per
/// multiprocessor of the rank's share of its GPU. A multiprocessor holds two such blocks
/// (__launch_bounds__(512, 2)), which leaves room for the point-to-point kernel.
int max_concurrent_blocks(const std::vector<DeviceLocation>& locations) {
  int blocks = peer::max_blocks;
  for (const DeviceLocation& h : locations) {
    const auto sharing =
        std::count_if(locations.begin(), locations.end(), [&](auto& o) { return same_gpu(h, o); });
    blocks = std::min(blocks, h.multiprocessors / static_cast<int>(sharing));
  }
  return std::max(blocks, 1);
}

void enable_peer_access(Device device, int rank, const DeviceLocation& peer, int peer_rank) {
  if (peer.device == device.index) return;
  bool can = false;
  cuda::check(runtime().can_access_peer(&can, device.index, peer.device), "cudaDeviceCanAccessPeer", device);
  require(can, Errc::unsupported, "rank ", rank, " on ", name(device), " cannot reach the memory of rank ",
          peer_rank, " on cuda:", peer.device, "; use the backend 'nccl' or 'native'");
  const cuda::DeviceGuard guard(device);
  cuda::check(runtime().enable_peer_access(peer.device), "cudaDeviceEnablePeerAccess", device);
}

/// CUDA counts how often a process has mapped a handle, but refuses it to a thread while another one maps it
/// (cudaErrorAlreadyMapped).
constinit ProcessMutex mapping;

/// Maps memory of another process; unmapped with the last copy of the pointer.
Memory open_ipc(const cuda::IpcHandle& handle, Device device) {
  const cuda::DeviceGuard guard(device);
  const std::lock_guard one_thread(mapping);
  void* base = nullptr;
  cuda::check(runtime().ipc_open_handle(&base, handle), "cudaIpcOpenMemHandle", device);
  return {static_cast<std::byte*>(base), [device](std::byte* p) {
            const cuda::DeviceGuard current(device, std::nothrow);
            const std::lock_guard last(mapping);
            runtime().ipc_close(p);
          }};
}

}  // namespace

namespace {

std::optional<std::pair<int, int>> find_threads_on_one_gpu(const std::vector<DeviceLocation>& locations) {
  for (std::size_t b = 1; b < locations.size(); ++b)
    for (std::size_t a = 0; a < b; ++a)
      if (locations[a].process_id == locations[b].process_id && same_gpu(locations[a], locations[b]))
        return std::pair(static_cast<int>(a), static_cast<int>(b));
  return {};
}

}  // namespace

PeerArenas::PeerArenas(Backend& host, int rank, int size, Device device, std::size_t slot_bytes)
    : device_(device),
      status_(allocate_pinned(device, sizeof(peer::DeviceStatus))),
      control_stream_(Stream::create(device)) {
  require(size <= peer::max_ranks, Errc::unsupported, "the backend 'peer_cuda' serves at most ",
          peer::max_ranks, " ranks, not ", size, "; use 'nccl' or 'native'");
  const DeviceLocation mine = locate_device(device);
  locations_ = all_gather_value(host, mine, size);
  for (int r = 0; r < size; ++r) {
    const DeviceLocation& h = locations_[static_cast<std::size_t>(r)];
    if (!same_machine(h, mine))
      throw Error(
          Errc::unsupported,
          concat("rank ", rank, ": rank ", r,
                 " is on another host, and the backend 'peer_cuda' is for one; use 'nccl' or 'native'"),
          r);
    one_process_ = one_process_ && h.process_id == mine.process_id;
    if (h.process_id == mine.process_id) enable_peer_access(device, rank, h, r);
    if (h.process_id == mine.process_id && r != rank && !deferred_frees_) deferred_frees_.emplace();
  }
  threads_on_one_gpu_ = find_threads_on_one_gpu(locations_);
  std::memset(status_.get(), 0, sizeof(peer::DeviceStatus));
  device_comm_ = {
      .rank = rank,
      .size = size,
      .layout = {.size = size,
                 .blocks = max_concurrent_blocks(locations_),
                 .slot_bytes = (slot_bytes + 255) / 256 * 256,
                 .message_bytes = std::min<std::size_t>((slot_bytes + 255) / 256 * 256, 64 << 10)},
      .status = reinterpret_cast<peer::DeviceStatus*>(status_.get())};
  const auto arena = allocate_on(device, device_comm_.layout.bytes());
  memset_async(arena.get(), 0, device_comm_.layout.slots(), control_stream_);
  control_stream_.synchronize();
  arenas_ = map_peers(host, arena);
  for (int r = 0; r < size; ++r) device_comm_.arenas[r] = arenas_[static_cast<std::size_t>(r)].get();
}

std::vector<Memory> PeerArenas::map_peers(Backend& host, const Memory& mine) {
  std::optional<Error> problem;
  MemoryHandle own_handle;
  keep_first_error(problem, [&] { own_handle = export_memory(mine, device_, one_process_); });
  const std::vector<MemoryHandle> all = all_gather_value(host, own_handle, device_comm_.size);
  ExportedMemory exported(mine);
  std::vector<Memory> parts;
  keep_first_error(problem, [&] {
    for (int r = 0; r < device_comm_.size; ++r) {
      const auto i = static_cast<std::size_t>(r);
      if (all[i].owner == 0)
        throw Error(Errc::system,
                    concat("rank ", r, " has no device memory to share; its own error has the reason"), r);
      const bool same_process =
          locations_[i].process_id == locations_[static_cast<std::size_t>(device_comm_.rank)].process_id;
      parts.push_back(same_process ? *reinterpret_cast<const Memory*>(all[i].owner)
                                   : open_ipc(all[i].handle, device_));
    }
  });
  // Every rank's `mine` must exist until all ranks have mapped it.
  const auto mapped = all_gather_value(host, static_cast<std::uint8_t>(!problem), device_comm_.size);
  const auto failed = std::find(mapped.begin(), mapped.end(), 0);
  if (failed != mapped.end()) {
    parts.clear();
    host_barrier(host);  // now no rank has anything mapped
  }
  exported.release();
  if (problem) throw *problem;
  const auto culprit = static_cast<int>(failed - mapped.begin());
  if (failed != mapped.end())
    throw Error(Errc::system,
                concat("rank ", culprit, " cannot map its peers' memory; its own error has the reason"),
                culprit);
  return parts;
}

/// This rank may hold the last reference to a peer's arena: the writes of signal_departure() must complete
/// before it is freed.
PeerArenas::~PeerArenas() {
  if (!drain()) leak();
}

bool PeerArenas::drain() const noexcept {
  try {
    const Deadline deadline = Deadline::after(std::chrono::seconds(2));
    const Event last = control_stream_.record();
    while (!last.done() && !deadline.expired()) std::this_thread::sleep_for(poll_period::device_drain);
    return last.done();
  } catch (const Error&) {  // the device has failed
    return false;
  }
}

void PeerArenas::unmap_peers() noexcept {
  for (std::size_t r = 0; r < arenas_.size(); ++r)
    if (static_cast<int>(r) != device_comm_.rank) arenas_[r].reset();
}

void PeerArenas::signal_departure(peer::Departure how) noexcept {
  try {
    for (int r = 0; r < device_comm_.size; ++r) {
      if (r == device_comm_.rank) continue;
      auto* const gone =
          &reinterpret_cast<peer::DeviceCounters*>(device_comm_.arenas[r])->departed[device_comm_.rank];
      memcpy_async(gone, &how, sizeof how, control_stream_);
    }
  } catch (const Error&) {  // the device has failed; the peers' deadlines still apply
  }
}

void PeerArenas::leak() noexcept {
  static_cast<void>(new std::vector<Memory>(arenas_));
  static_cast<void>(new Memory(status_));
}

}  // namespace rz
