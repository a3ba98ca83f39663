#include "comm/backends/peer_group.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>
#include <thread>

#include "comm/core/cuda/runtime.h"
#include "comm/core/deadline.h"
#include "comm/core/error.h"

namespace rz {

namespace {

using cuda::runtime;

using Memory = std::shared_ptr<std::byte>;

/// How a rank's memory is reached.
struct Access {
  std::uint64_t owner = 0;  ///< a shared_ptr's address, for ranks of its process; 0: it has none
  cuda::IpcHandle handle{};
};

Access access_to(const Memory& memory, Device device, bool one_process) {
  if (!memory) return {};
  Access access{.owner = reinterpret_cast<std::uint64_t>(&memory)};
  if (one_process) return access;
  const cuda::DeviceGuard guard(device);
  cuda::check(runtime().ipc_get_handle(&access.handle, memory.get()), "cudaIpcGetMemHandle", device);
  return access;
}

/// Memory that peers may have mapped: it is never given back, unless they have said that they have not.
class Exposed {
 public:
  explicit Exposed(Memory memory) : memory_(std::move(memory)) {}
  ~Exposed() {
    if (memory_) static_cast<void>(new Memory(std::move(memory_)));
  }
  Exposed(const Exposed&) = delete;
  Exposed& operator=(const Exposed&) = delete;
  void withdraw() { memory_.reset(); }

 private:
  Memory memory_;
};

/// What goes wrong first.
template <class F>
void attempt(std::optional<Error>& problem, const F& f) {
  try {
    f();
  } catch (const Error& e) {
    if (!problem) problem = e;
  }
}

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
Memory open_ipc(const cuda::IpcHandle& handle, Device device) {
  const cuda::DeviceGuard guard(device);
  void* base = nullptr;
  cuda::check(runtime().ipc_open_handle(&base, handle), "cudaIpcOpenMemHandle", device);
  return {static_cast<std::byte*>(base), [device](std::byte* p) {
            const cuda::DeviceGuard current(device, std::nothrow);
            runtime().ipc_close(p);
          }};
}

}  // namespace

PeerGroup::PeerGroup(Backend& host, int rank, int size, Device device, std::size_t slot_bytes)
    : device_(device),
      status_(allocate_pinned(device, sizeof(peer::Status))),
      control_(Stream::create(device)) {
  require(size <= peer::most_ranks, Errc::unsupported, "the backend 'peer_cuda' serves at most ",
          peer::most_ranks, " ranks, not ", size, "; use 'nccl' or 'ring'");
  const Home mine = home_of(device);
  homes_ = tell_all(host, mine, size);
  for (int r = 0; r < size; ++r) {
    const Home& h = homes_[static_cast<std::size_t>(r)];
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
                      .blocks = blocks_for_all(homes_),
                      .slot_bytes = (slot_bytes + 255) / 256 * 256,
                      .message_bytes = std::min<std::size_t>((slot_bytes + 255) / 256 * 256, 64 << 10)},
           .status = reinterpret_cast<peer::Status*>(status_.get())};
  const auto arena = allocate_on(device, seat_.layout.bytes());
  set_bytes(arena.get(), 0, seat_.layout.slots(), control_);
  control_.synchronize();
  arenas_ = exchange(host, arena);
  for (int r = 0; r < size; ++r) seat_.arenas[r] = arenas_[static_cast<std::size_t>(r)].get();
}

std::vector<Memory> PeerGroup::exchange(Backend& host, const Memory& mine) {
  std::optional<Error> problem;
  Access access;
  attempt(problem, [&] { access = access_to(mine, device_, one_process_); });
  const std::vector<Access> all = tell_all(host, access, seat_.size);
  Exposed exposed(mine);
  std::vector<Memory> parts;
  attempt(problem, [&] {
    for (int r = 0; r < seat_.size; ++r) {
      const auto i = static_cast<std::size_t>(r);
      if (all[i].owner == 0)
        throw Error(Errc::system, str("rank ", r, " has no device memory to share; it says why"), r);
      const bool here = homes_[i].process == homes_[static_cast<std::size_t>(seat_.rank)].process;
      parts.push_back(here ? *reinterpret_cast<const Memory*>(all[i].owner)
                           : open_ipc(all[i].handle, device_));
    }
  });
  // Until then everybody's `mine` must be there.
  const auto well = tell_all(host, static_cast<std::uint8_t>(!problem), seat_.size);
  const auto bad = std::find(well.begin(), well.end(), 0);
  if (bad != well.end()) {
    parts.clear();
    meet_on_host(host);  // now nobody has mapped anything
  }
  exposed.withdraw();
  if (problem) throw *problem;
  const auto culprit = static_cast<int>(bad - well.begin());
  if (bad != well.end())
    throw Error(Errc::system, str("rank ", culprit, " cannot map its peers' memory; it says why"), culprit);
  return parts;
}

/// This rank may hold a peer's arena last: what leave() wrote there must have arrived before it goes.
PeerGroup::~PeerGroup() {
  if (!quiet()) keep();
}

bool PeerGroup::quiet() const noexcept {
  try {
    const Deadline deadline = Deadline::after(std::chrono::seconds(2));
    const Event last = control_.record();
    while (!last.done() && !deadline.expired()) std::this_thread::sleep_for(std::chrono::microseconds(20));
    return last.done();
  } catch (const Error&) {  // a device that has failed
    return false;
  }
}

void PeerGroup::let_go() noexcept {
  for (std::size_t r = 0; r < arenas_.size(); ++r)
    if (static_cast<int>(r) != seat_.rank) arenas_[r].reset();
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

void PeerGroup::keep() noexcept {
  static_cast<void>(new std::vector<Memory>(arenas_));
  static_cast<void>(new Memory(status_));
}

}  // namespace rz
