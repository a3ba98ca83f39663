#include "comm/backends/peer_group.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "comm/backends/homes.h"
#include "comm/core/cuda/runtime.h"
#include "comm/core/deadline.h"
#include "comm/core/error.h"

namespace rz {

namespace {

using cuda::runtime;

/// How a rank's arena is reached.
struct Access {
  std::uint64_t owner = 0;  ///< a shared_ptr's address, for ranks of its process
  cuda::IpcHandle handle{};
};

void meet_on_host(Backend& host) {
  const Operation op{.kind = Collective::barrier};
  host.submit({&op, 1}).wait();
}

/// How many blocks of every rank can be on its card at once: a collective's kernel has at most one block for
/// each multiprocessor that the rank would have alone if ranks shared their card evenly. A multiprocessor
/// holds two such blocks (__launch_bounds__(512, 2)), so that there is room for the kernel of messages beside
/// it.
int blocks_for_all(const std::vector<Home>& homes) {
  int blocks = peer::most_blocks;
  for (const Home& h : homes) {
    const auto sharing = std::count_if(homes.begin(), homes.end(), [&](auto& o) { return same_card(h, o); });
    blocks = std::min(blocks, h.multiprocessors / static_cast<int>(sharing));
  }
  return std::max(blocks, 1);
}

void reach(Device device, int rank, const Home& peer, int peer_rank) {
  if (peer.device == device.index) return;
  bool can = false;
  cuda::check(runtime().can_access_peer(&can, device.index, peer.device), "cudaDeviceCanAccessPeer", device);
  require(can, Errc::unsupported, "rank ", rank, " on ", name(device), " cannot reach the memory of rank ",
          peer_rank, " on cuda:", peer.device, "; use the backend 'nccl' or 'ring'");
  const cuda::DeviceGuard guard(device);
  cuda::check(runtime().enable_peer_access(peer.device), "cudaDeviceEnablePeerAccess", device);
}

/// Memory of another process; closed with the last copy.
std::shared_ptr<std::byte> open_ipc(const cuda::IpcHandle& handle, Device device) {
  const cuda::DeviceGuard guard(device);
  void* base = nullptr;
  cuda::check(runtime().ipc_open_handle(&base, handle), "cudaIpcOpenMemHandle", device);
  return {static_cast<std::byte*>(base), [](std::byte* p) { runtime().ipc_close(p); }};
}

}  // namespace

PeerGroup::PeerGroup(Backend& host, int rank, int size, Device device, std::size_t slot_bytes)
    : device_(device), status_(allocate_pinned(sizeof(peer::Status))), control_(Stream::create(device)) {
  require(size <= peer::most_ranks, Errc::unsupported, "the backend 'peer_cuda' serves at most ",
          peer::most_ranks, " ranks, not ", size, "; use 'nccl' or 'ring'");
  const Home mine = home_of(device);
  const std::vector<Home> homes = tell_all(host, mine, size);
  for (int r = 0; r < size; ++r) {
    const Home& h = homes[static_cast<std::size_t>(r)];
    if (!same_machine(h, mine))
      throw Error(Errc::unsupported,
                  str("rank ", rank, ": rank ", r,
                      " is on another host, and the backend 'peer_cuda' is for one; use 'nccl' or 'ring'"),
                  r);
    one_process_ = one_process_ && h.process == mine.process;
    if (h.process == mine.process) reach(device, rank, h, r);
  }
  std::memset(status_.get(), 0, sizeof(peer::Status));
  seat_ = {.rank = rank,
           .size = size,
           .layout = {.size = size,
                      .blocks = blocks_for_all(homes),
                      .slot_bytes = (slot_bytes + 255) / 256 * 256,
                      .message_bytes = std::min<std::size_t>((slot_bytes + 255) / 256 * 256, 64 << 10)},
           .status = reinterpret_cast<peer::Status*>(status_.get())};
  const auto arena = allocate_on(device, seat_.layout.bytes());
  set_bytes(arena.get(), 0, seat_.layout.slots(), control_);
  control_.synchronize();

  Access access{.owner = reinterpret_cast<std::uint64_t>(&arena)};
  if (!one_process_) {
    const cuda::DeviceGuard guard(device);
    cuda::check(runtime().ipc_get_handle(&access.handle, arena.get()), "cudaIpcGetMemHandle", device);
  }
  const std::vector<Access> all = tell_all(host, access, size);
  for (int r = 0; r < size; ++r) {
    const auto i = static_cast<std::size_t>(r);
    arenas_.push_back(homes[i].process == mine.process
                          ? *reinterpret_cast<const std::shared_ptr<std::byte>*>(all[i].owner)
                          : open_ipc(all[i].handle, device));
    seat_.arenas[i] = arenas_.back().get();
  }
  meet_on_host(host);  // until then everybody's `arena` must be there
}

/// This rank may hold a peer's arena last: what leave() wrote there must have arrived before it goes.
PeerGroup::~PeerGroup() {
  try {
    const Deadline deadline = Deadline::after(std::chrono::seconds(2));
    const Event last = control_.record();
    while (!last.done() && !deadline.expired()) std::this_thread::sleep_for(std::chrono::microseconds(20));
    if (last.done()) return;
  } catch (const Error&) {  // a device that has failed
  }
  static_cast<void>(new std::vector<std::shared_ptr<std::byte>>(arenas_));  // never given back
}

void PeerGroup::leave(peer::Leaving how) noexcept {
  try {
    for (int r = 0; r < seat_.size; ++r) {
      if (r == seat_.rank) continue;
      auto* const gone = &reinterpret_cast<peer::Counters*>(seat_.arenas[r])->gone[seat_.rank];
      copy_bytes(gone, &how, sizeof how, control_);
    }
  } catch (const Error&) {  // a device that has failed; the peers' deadlines remain
  }
}

void PeerGroup::keep_arena() noexcept {
  static_cast<void>(new std::shared_ptr<std::byte>(arenas_[static_cast<std::size_t>(seat_.rank)]));
}

}  // namespace rz
