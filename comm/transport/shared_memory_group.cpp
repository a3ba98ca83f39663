#include "comm/transport/shared_memory_group.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "comm/core/error.h"
#include "comm/net/unix_socket.h"
#include "comm/os/asymmetric_fence.h"

namespace rz {

// ---- connecting ----

SharedMemoryGroup::SharedMemoryGroup(LinkMonitor& monitor, std::vector<int> ranks, std::size_t ring_bytes,
                                     bool one_node, std::shared_ptr<SharedMemoryAllocator> memory)
    : monitor_(monitor),
      ranks_(std::move(ranks)),
      one_node_(one_node),
      // Of the channels to many peers, small messages touch a few pages each.
      memory_(SharedMemory::create(shm::rank_memory_bytes(ranks_.size(), ring_bytes),
                                   shm::channels_bytes(ranks_.size()))),
      allocator_(memory
                     ? std::move(memory)
                     : std::make_shared<SharedMemoryAllocator>(static_cast<std::uint32_t>(monitor.rank()))),
      released_(allocator_->watch_released()) {
  auto* const own = new (memory_.data()) shm::Header;
  own->staging_bytes = ring_bytes;
  own->rank = static_cast<std::uint32_t>(monitor.rank());
  own->ranks = static_cast<std::uint32_t>(ranks_.size());
  own->asymmetric_fence = register_asymmetric_fence();
  own->cma_probe = net::random_id();
  own->cma_probe_address = reinterpret_cast<std::uint64_t>(&own->cma_probe);
}

std::vector<int> SharedMemoryGroup::passed_fds() { return {memory_.fd(), monitor_.poller().doorbell()}; }

void SharedMemoryGroup::attach(std::vector<net::Connection> connections) {
  by_rank_.resize(monitor_.nodes().size());
  for (auto& c : connections) attach(std::move(c));
  memory_.close_fd();
  asymmetric_fence_ = header()->asymmetric_fence;
  std::size_t ring_bytes = header()->staging_bytes;
  std::vector<shm::Header*> headers(by_rank_.size());
  headers[static_cast<std::size_t>(monitor_.rank())] = header();
  for (const auto& peer : peers_) {
    headers[static_cast<std::size_t>(peer->rank)] = peer->header();
    ring_bytes = std::min<std::size_t>(ring_bytes, peer->header()->staging_bytes);
    asymmetric_fence_ = asymmetric_fence_ && peer->header()->asymmetric_fence;
    has_cma_ = has_cma_ && probe_cma(*peer);
  }
  for (const int r : ranks_)
    mailboxes_.push_back(shm::mailbox_view(reinterpret_cast<std::byte*>(headers[static_cast<std::size_t>(r)]),
                                           ranks_.size(), ring_bytes, !asymmetric_fence_));
  for (auto& peer : peers_) peer->mailbox = mailboxes_[index_of(peer->rank)].mailbox;
  election_ = FailureElection(monitor_.rank(), std::move(headers));
}

void SharedMemoryGroup::attach(net::Connection c) {
  require(
      c.received_fds.size() == 2, Errc::system, "rank ", c.rank,
      " passed no shared memory: its or this process has too many files open (ulimit -n raises the limit)");
  SharedMemory memory = SharedMemory::map(std::move(c.received_fds[0]), true);
  memory.close_fd();
  const pid_t pid = net::peer_pid(c.socket.get());
  peers_.push_back(std::unique_ptr<ShmPeer>(
      new ShmPeer{c.rank, pid, std::move(memory), std::move(c.received_fds[1]),
                  SegmentSocket(c.rank, std::move(c.socket), monitor_.poller(), monitor_.wait_graph())}));
  ShmPeer& peer = *peers_.back();
  const shm::Header* const h = peer.header();
  require(peer.memory.size() >= sizeof(shm::Header) && h->magic_word == shm::magic &&
              h->rank == static_cast<std::uint32_t>(peer.rank) && h->ranks == ranks_.size() &&
              peer.memory.size() == shm::rank_memory_bytes(ranks_.size(), h->staging_bytes),
          Errc::rendezvous, "rank ", peer.rank,
          " lays out shared memory in another way; is it the same build?");
  by_rank_[static_cast<std::size_t>(peer.rank)] = &peer;
}

/// Whether the peer's process id is valid here, and the kernel lets this rank read that process.
bool SharedMemoryGroup::probe_cma(const ShmPeer& peer) const {
  net::JobId key{};
  const auto into = std::as_writable_bytes(std::span(key));
  return peer.pid > 0 && cma_read_process(peer.pid, peer.header()->cma_probe_address, into) == 0 &&
         key == peer.header()->cma_probe;
}

std::size_t SharedMemoryGroup::index_of(int rank) const {
  return static_cast<std::size_t>(std::find(ranks_.begin(), ranks_.end(), rank) - ranks_.begin());
}

shm::ChannelMemory SharedMemoryGroup::incoming(const ShmPeer& peer, int channel) const {
  return shm::channel_memory(header(), index_of(monitor_.rank()), index_of(peer.rank), channel,
                             ranks_.size());
}

shm::ChannelMemory SharedMemoryGroup::outgoing(const ShmPeer& peer, int channel) const {
  return shm::channel_memory(peer.header(), index_of(peer.rank), index_of(monitor_.rank()), channel,
                             ranks_.size());
}

// ---- segments ----

std::shared_ptr<Segment> SharedMemoryGroup::sent_segment(ShmPeer& peer, std::span<const std::byte> bytes) {
  allocator_->refresh(segment_map_);
  auto segment = segment_map_.find(bytes.data(), bytes.size());
  return segment && peer.socket.send(*segment) ? segment : nullptr;
}

std::optional<SharedMemoryHandle> SharedMemoryGroup::export_handle(std::span<const std::byte> bytes) {
  allocator_->refresh(segment_map_);
  if (exported_.version != segment_map_.version) exported_ = {.version = segment_map_.version};
  auto& [last, before] = exported_.ranges;
  for (const auto& range : exported_.ranges)
    if (bytes.data() >= range.begin && bytes.data() + bytes.size() <= range.end)
      return range.handle(bytes.data());
  const auto segment = segment_map_.find(bytes.data(), bytes.size());
  if (!segment) return std::nullopt;
  for (auto& peer : peers_)
    if (!peer->socket.send(*segment)) return std::nullopt;
  const std::byte* const begin = segment->memory.data();
  before = std::exchange(last, {begin, begin + segment->memory.size(), segment->number});
  return last.handle(bytes.data());
}

std::byte* SharedMemoryGroup::map_handle(int peer, const SharedMemoryHandle& at, std::size_t bytes) {
  // Its descriptor was sent before the handle.
  const SharedMemory* const memory = peer_at(peer).socket.find(at.segment);
  if (!memory || bytes > memory->size() || at.offset > memory->size() - bytes) return nullptr;
  return memory->data() + at.offset;
}

CmaResult SharedMemoryGroup::cma_read(int peer, std::uint64_t address, std::span<std::byte> into) {
  const int error = cma_read_process(peer_at(peer).pid, address, into);
  if (error == 0) return CmaResult::done;
  if (error == ESRCH) return require_alive(peer), CmaResult::gone;  // its socket will show how it ended
  if (election_.elected()) return CmaResult::gone;  // the peer may have freed its memory after it
  if (error == EPERM || error == EACCES || error == ENOSYS) return has_cma_ = false, CmaResult::refused;
  fail(Errc::system, "process_vm_readv of ", into.size(), " bytes at ", address, " of rank ", peer,
       ", process ", peer_at(peer).pid, ": ", std::strerror(error));
}

// ---- waiting, departing ----

void SharedMemoryGroup::wake_peers() {
  for (auto& peer : peers_) peer->wake_if_sleeping();
}

bool SharedMemoryGroup::changed() {
  bool any = false;
  for (auto& peer : peers_) {
    const std::uint64_t state =
        static_cast<std::uint64_t>(peer->mailbox->acked.load(std::memory_order_seq_cst)) << 32 |
        peer->mailbox->produced.load(std::memory_order_seq_cst);
    any |= state != std::exchange(peer->mailbox_seen, state);
  }
  return any;
}

void SharedMemoryGroup::set_sleeping(bool asleep) {
  header()->sleeping.store(asleep, std::memory_order_seq_cst);
  if (asleep && asymmetric_fence_) heavy_fence();
}

std::optional<Failure> SharedMemoryGroup::poll() {
  release_segments();
  std::optional<Failure> lost;
  for (auto& peer : peers_) {
    if (peer->departed || !peer->socket.poll()) continue;
    peer->departed = true;
    if (peer->header()->state.load(std::memory_order_seq_cst) != shm::State::departed && !lost)
      lost = Failure{peer->rank, Errc::peer_lost,
                     concat("rank ", peer->rank, " died: its process ended without leaving the group")};
  }
  return lost;
}

void SharedMemoryGroup::release_segments() {
  if (released_->any()) {
    std::vector<std::uint32_t> numbers;
    allocator_->drain_released(*released_, numbers);
    for (auto& peer : peers_) peer->socket.release(numbers);
  }
  for (auto& peer : peers_) peer->socket.flush_releases();
}

void SharedMemoryGroup::depart() {
  header()->state.store(shm::State::departed, std::memory_order_seq_cst);
  for (auto& peer : peers_) peer->socket.close();
}

}  // namespace rz
