#include "comm/transport/shm_transport.h"

#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <utility>

#include "comm/core/error.h"
#include "comm/core/integer_math.h"
#include "comm/net/random.h"
#include "comm/net/unix_socket.h"
#include "comm/os/asymmetric_fence.h"
#include "comm/os/cma.h"

namespace rz {

namespace shm {

constexpr std::uint64_t magic = 0x326f72657a676e72;  // "rngzero2"
constexpr std::size_t cache_line = 64;
constexpr std::size_t frame_inline_bytes = 24;
constexpr std::uint32_t in_frame = 0xffffffff, in_ring = 0xfffffffe;
constexpr std::size_t max_reference_bytes = std::size_t{1} << 30;

enum State : std::uint32_t { active = 0, departed = 1 };

/// At the start of every rank's memfd.
struct Header {
  std::uint64_t magic_word = magic;
  std::uint32_t rank = 0, ranks = 0;
  std::uint64_t staging_bytes = 0;      ///< size of its staging ring
  std::uint32_t asymmetric_fence = 0;   ///< register_asymmetric_fence() succeeded
  JobId cma_probe{};                    ///< random; see probe_cma()
  std::uint64_t cma_probe_address = 0;  ///< its address in the rank's process
  alignas(cache_line) std::atomic<std::uint32_t> sleeping{0};
  alignas(cache_line) std::atomic<std::uint32_t> state{active};
  /// In the leader's header: 1 + the rank whose header has the group's first failure; 0: no failure.
  std::atomic<std::uint32_t> elected_rank{0};
  std::int32_t culprit = -1;
  std::uint32_t code = 0;
  char reason[488] = {};
};

/// `ready` is the frame's number + 1 and is written last. The reader polls this line alone.
struct alignas(cache_line) Frame {
  std::atomic<std::uint64_t> ready;
  CallSignature signature;
  std::uint32_t length;
  std::uint32_t location;  ///< in_frame, in_ring, or a segment's number
  union {
    std::uint64_t offset;
    std::byte payload[frame_inline_bytes];
  };
};
static_assert(sizeof(Frame) == cache_line && sizeof(CallSignature) == 24);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

/// Written only by the channel's reader.
struct alignas(cache_line) ChannelCounters {
  std::atomic<std::uint64_t> frames_done, ring_done, consumed;
};

/// Sizes of a channel. The rings shrink when many ranks share the host, since the number of channels grows
/// with the square of the number of ranks.
struct ChannelLayout {
  std::size_t frames, ring_bytes;
  std::size_t bytes() const { return sizeof(ChannelCounters) + frames * sizeof(Frame) + ring_bytes; }
};
ChannelLayout channel_layout(int lane, std::size_t ranks) {
  const std::size_t ring =
      std::clamp<std::size_t>((std::size_t{4} << 20) / ranks / 4096 * 4096, 16 << 10, 256 << 10);
  return lane == static_cast<int>(Channel::collective) ? ChannelLayout{256, ring}
                                                       : ChannelLayout{64, ring / 4};
}

/// Bytes of the channels from one peer. An odd number of lines beyond whole pages, so that the channels of
/// different peers do not compete for the same cache sets.
std::size_t peer_stride(std::size_t ranks) {
  return round_up(channel_layout(0, ranks).bytes() + channel_layout(1, ranks).bytes(), 4096) +
         13 * cache_line;
}
constexpr std::size_t header_bytes = round_up(sizeof(Header), 4096) + cache_line;

// The staging ring does not start at a page boundary, so that it does not compete with whole pages for the
// same cache sets.
constexpr std::size_t staging_offset = 5 * cache_line;
std::size_t mailbox_offset(std::size_t ranks) {
  return round_up(header_bytes + (ranks - 1) * peer_stride(ranks), 4096);
}
std::size_t rank_memory_bytes(std::size_t ranks, std::size_t ring_bytes) {
  return mailbox_offset(ranks) + round_up(sizeof(Mailbox), 4096) + staging_offset + ring_bytes;
}
MailboxView mailbox_view(std::byte* memory, std::size_t ranks, std::size_t ring_bytes, bool fences) {
  std::byte* const at = memory + mailbox_offset(ranks);
  return {reinterpret_cast<Mailbox*>(at), at + round_up(sizeof(Mailbox), 4096) + staging_offset, ring_bytes,
          &reinterpret_cast<Header*>(memory)->sleeping, fences};
}
/// Changes whenever the rank publishes a slot or acknowledges steps.
std::uint64_t mailbox_state(const Mailbox& place) {
  return static_cast<std::uint64_t>(place.acked.load(std::memory_order_seq_cst)) << 32 |
         place.produced.load(std::memory_order_seq_cst);
}

struct ChannelMemory {
  Frame* frames;
  ChannelCounters* counters;
  std::byte* ring;
};
/// The channel number `lane` of the peer with index `slot`, in the memory that starts with `header`.
ChannelMemory channel_memory(Header* header, std::size_t slot, int lane, std::size_t ranks) {
  std::byte* at = reinterpret_cast<std::byte*>(header) + header_bytes + slot * peer_stride(ranks);
  if (lane == 1) at += channel_layout(0, ranks).bytes();
  auto* counters = reinterpret_cast<ChannelCounters*>(at);
  auto* frames = reinterpret_cast<Frame*>(at + sizeof(ChannelCounters));
  return {frames, counters, reinterpret_cast<std::byte*>(frames + channel_layout(lane, ranks).frames)};
}

/// Message on the unix sockets: a segment with its descriptor, the release of a segment, or a wait-for
/// message.
struct SocketMessage {
  enum Kind : std::uint32_t { segment, release, wait } kind;
  std::uint32_t number = 0;
  WaitMessage wait_message = {};
};

}  // namespace shm

using namespace shm;

ShmTransport::ShmTransport(int rank, std::vector<int> ranks, std::size_t ring_bytes, Poller& poller,
                           WaitForGraph& waiting)
    : rank_(rank),
      ranks_(std::move(ranks)),
      poller_(poller),
      wait_graph_(waiting),
      address_("ringzero-" + random_hex()) {
  if (ranks_.size() < 2) return;
  listener_ = listen_unix(address_);
  memory_ = SharedMemory::create(rank_memory_bytes(ranks_.size(), ring_bytes));
  header_ = new (memory_.data()) Header;
  header_->staging_bytes = ring_bytes;
  header_->rank = static_cast<std::uint32_t>(rank);
  header_->ranks = static_cast<std::uint32_t>(ranks_.size());
  header_->asymmetric_fence = register_asymmetric_fence();
  header_->cma_probe = random_id();
  header_->cma_probe_address = reinterpret_cast<std::uint64_t>(&header_->cma_probe);
}

void ShmTransport::connect(HandshakeInfo me, const std::vector<std::string>& addresses, Deadline deadline) {
  by_rank_.resize(addresses.size());
  if (ranks_.size() < 2) return;
  me.passed_fds = {memory_.fd(), poller_.doorbell()};
  std::vector<Connection> calls;
  std::vector<int> callers;
  for (const int peer : ranks_) {
    const auto& address = addresses[static_cast<std::size_t>(peer)];
    if (peer < rank_) calls.push_back({peer, 0, connect_unix(address, deadline), {}, address});
    if (peer > rank_) callers.push_back(peer);
  }
  for (auto& c : handshake(me, listener_.get(), std::move(calls), callers, 1, deadline)) attach(std::move(c));
  listener_.close();
  memory_.close_fd();
  asymmetric_fence_ = header_->asymmetric_fence;
  has_cma_ = true;
  std::size_t ring_bytes = header_->staging_bytes;
  for (const auto& l : peers_) {
    ring_bytes = std::min<std::size_t>(ring_bytes, l->header->staging_bytes);
    asymmetric_fence_ = asymmetric_fence_ && l->header->asymmetric_fence;
    has_cma_ = has_cma_ && probe_cma(*l);
  }
  for (const int r : ranks_)
    mailboxes_.push_back(mailbox_view(r == rank_ ? memory_.data() : peer_at(r).memory.data(), ranks_.size(),
                                      ring_bytes, !asymmetric_fence_));
  leader_ = ranks_.front() == rank_ ? header_ : peer_at(ranks_.front()).header;
}

void ShmTransport::attach(Connection connection) {
  const std::size_t n = ranks_.size();
  require(
      connection.received_fds.size() == 2, Errc::system, "rank ", connection.rank,
      " passed no shared memory: its or this process has too many files open (ulimit -n raises the limit)");
  auto fresh = std::make_unique<Peer>();
  Peer& l = *fresh;
  l.rank = connection.rank;
  l.memory = SharedMemory::map(std::move(connection.received_fds[0]), true);
  l.memory.close_fd();
  l.doorbell = std::move(connection.received_fds[1]);
  l.socket = std::move(connection.socket);
  l.pid = peer_pid(l.socket.get());
  l.header = reinterpret_cast<Header*>(l.memory.data());
  require(l.memory.size() >= sizeof(Header) && l.header->magic_word == magic &&
              l.header->rank == static_cast<std::uint32_t>(l.rank) && l.header->ranks == n &&
              l.memory.size() == rank_memory_bytes(n, l.header->staging_bytes),
          Errc::rendezvous, "rank ", l.rank, " lays out shared memory in another way; is it the same build?");
  const auto slot = [&](int owner, int sender) {  // the owner has no channel from itself
    const auto of = [&](int r) { return std::find(ranks_.begin(), ranks_.end(), r) - ranks_.begin(); };
    return static_cast<std::size_t>(of(sender) - (sender > owner));
  };
  for (int lane = 0; lane < channel_count; ++lane) {
    const ChannelLayout s = channel_layout(lane, n);
    const ChannelMemory in = channel_memory(header_, slot(rank_, l.rank), lane, n);
    const ChannelMemory out = channel_memory(l.header, slot(l.rank, rank_), lane, n);
    auto& i = l.in[static_cast<std::size_t>(lane)];
    auto& o = l.out[static_cast<std::size_t>(lane)];
    i.frames = in.frames, i.counters = in.counters, i.ring = in.ring;
    o.frames = out.frames, o.counters = out.counters, o.ring = out.ring;
    i.frame_count = o.frame_count = s.frames, i.ring_bytes = o.ring_bytes = s.ring_bytes;
  }
  l.mailbox_index =
      static_cast<std::size_t>(std::find(ranks_.begin(), ranks_.end(), l.rank) - ranks_.begin());
  poller_.add(l.socket.get(), l.fd_events, EPOLLIN);
  l.fd_events.events = EPOLLIN;  // messages may have arrived before the registration
  by_rank_[static_cast<std::size_t>(l.rank)] = &l;
  peers_.push_back(std::move(fresh));
}

/// Whether `pid` is the peer's process id here, and the kernel lets this rank read that process.
bool ShmTransport::probe_cma(const Peer& l) const {
  JobId key{};
  const auto into = std::as_writable_bytes(std::span(key));
  return l.pid > 0 && cma_read_process(l.pid, l.header->cma_probe_address, into) == 0 &&
         key == l.header->cma_probe;
}

ShmTransport::~ShmTransport() {
  if (!creator_.is_this_process()) return;
  if (header_) header_->state.store(State::departed, std::memory_order_seq_cst);
  for (auto& l : peers_) {
    for (auto& out : l->out) {
      reap_references(*l, out);
      for (auto& r : out.references) r.segment->memory.keep_for_peers();
    }
    poller_.remove(l->socket.get());
    l->socket.close();  // also wakes the peer
  }
}

// ---- sending ----

namespace {

/// Publishes frame number `number`, whose other fields are written.
void publish_frame(Frame& frame, std::uint64_t number) {
  frame.ready.store(number + 1, std::memory_order_seq_cst);
}

}  // namespace

std::size_t ShmTransport::post(int peer, Channel lane, const CallSignature& signature,
                               std::span<const std::byte> bytes) {
  Peer& l = peer_at(peer);
  if (l.departed) return fail_on_departed(l), 0;
  Outbound& out = l.out[static_cast<std::size_t>(lane)];
  std::shared_ptr<Segment> segment;
  // Shorter data is copied: that takes less time than the release of a reference.
  if (bytes.size() >= out.ring_bytes / 2) {
    allocator_->refresh(segment_map_);
    segment = segment_map_.find(bytes.data(), bytes.size());
    if (segment && !send_segment(l, *segment)) segment = nullptr;
  }
  const std::size_t taken = segment ? post_by_reference(l, out, signature, bytes, std::move(segment))
                                    : post_copy(out, signature, bytes);
  if (taken) wake_if_sleeping(l);
  return taken;
}

namespace {

bool has_free_frame(std::uint64_t posted, std::uint64_t count, std::uint64_t& done,
                    const ChannelCounters& counters) {
  if (posted - done < count) return true;
  done = counters.frames_done.load(std::memory_order_acquire);
  return posted - done < count;
}

}  // namespace

std::size_t ShmTransport::post_by_reference(Peer& l, Outbound& out, const CallSignature& signature,
                                            std::span<const std::byte> bytes,
                                            std::shared_ptr<Segment> segment) {
  reap_references(l, out);
  if (!has_free_frame(out.posted, out.frame_count, out.frames_done, *out.counters)) return 0;
  const std::size_t taken = std::min(bytes.size(), max_reference_bytes);
  Frame& frame = out.frames[out.posted % out.frame_count];
  frame.signature = signature;
  frame.length = static_cast<std::uint32_t>(taken);
  frame.location = segment->number;
  frame.offset = static_cast<std::uint64_t>(bytes.data() - segment->memory.data());
  out.references.push_back({out.accepted, out.accepted + taken, std::move(segment)});
  out.accepted += taken;
  publish_frame(frame, out.posted++);
  return taken;
}

/// Copies in pieces of at most a quarter of the ring, so that the reader processes one while the next is
/// copied. Pieces end at multiples of a cache line from the start of the post, so no element is split.
std::size_t ShmTransport::post_copy(Outbound& out, const CallSignature& signature,
                                    std::span<const std::byte> bytes) {
  std::size_t taken = 0;
  while (taken < bytes.size() &&
         has_free_frame(out.posted, out.frame_count, out.frames_done, *out.counters)) {
    const auto rest = bytes.subspan(taken);
    Frame& frame = out.frames[out.posted % out.frame_count];
    std::size_t piece = rest.size();
    if (piece <= frame_inline_bytes) {
      std::memcpy(frame.payload, rest.data(), piece);
      frame.location = in_frame;
    } else {
      const std::uint64_t at = out.ring_posted % out.ring_bytes;
      if (out.ring_posted - out.ring_done + std::min<std::uint64_t>(piece, out.ring_bytes / 4) >
          out.ring_bytes)
        out.ring_done = out.counters->ring_done.load(std::memory_order_acquire);
      const std::uint64_t room = std::min(
          {out.ring_bytes - (out.ring_posted - out.ring_done), out.ring_bytes - at, out.ring_bytes / 4});
      if (piece > room) piece = room / cache_line * cache_line;
      if (piece == 0) break;
      std::memcpy(out.ring + at, rest.data(), piece);
      frame.location = in_ring;
      frame.offset = at;
      out.ring_posted += round_up(piece, cache_line);
    }
    frame.signature = signature;
    frame.length = static_cast<std::uint32_t>(piece);
    publish_frame(frame, out.posted++);
    taken += piece;
  }
  out.accepted += taken;
  return taken;
}

void ShmTransport::wake_if_sleeping(Peer& l) {
  auto& asleep = l.header->sleeping;
  if (asleep.load(std::memory_order_seq_cst) && asleep.exchange(0)) Poller::ring_doorbell(l.doorbell.get());
}

/// Sends the segment's descriptor to the peer on first use. False if the peer's socket is full now.
bool ShmTransport::send_segment(Peer& l, const Segment& segment) {
  if (l.sent_segments.count(segment.number)) return true;
  if (!send_message(l.socket.get(), SocketMessage{SocketMessage::segment, segment.number},
                    segment.memory.fd()))
    return false;
  l.sent_segments.insert(segment.number);
  return true;
}

void ShmTransport::reap_references(Peer& l, Outbound& out) {
  if (out.references.empty()) return;
  const std::uint64_t consumed = out.counters->consumed.load(std::memory_order_acquire);
  while (!out.references.empty() && out.references.front().end <= consumed) out.references.pop_front();
  if (!out.references.empty() && l.departed) fail_on_departed(l);
}

std::uint64_t ShmTransport::released(int peer, Channel lane) {
  Peer& l = peer_at(peer);
  Outbound& out = l.out[static_cast<std::size_t>(lane)];
  reap_references(l, out);
  if (out.references.empty()) return out.accepted;
  return std::max(out.references.front().begin, out.counters->consumed.load(std::memory_order_acquire));
}

// ---- receiving ----

ReceiveView ShmTransport::peek(int peer, Channel lane) {
  Peer& l = peer_at(peer);
  Inbound& in = l.in[static_cast<std::size_t>(lane)];
  const Frame& frame = in.frames[in.next % in.frame_count];
  if (!in.at) {
    if (frame.ready.load(std::memory_order_acquire) != in.next + 1) {
      if (l.departed) fail_on_departed(l);
      return {};
    }
    in.at = resolve(l, in, frame);
    if (!in.at) return protocol_error(l, frame), ReceiveView{};
    in.remaining = frame.length;
  }
  return {frame.signature, {in.at, in.remaining}};
}

/// Address of the frame's bytes in this process; null if they are outside the mapped memory.
const std::byte* ShmTransport::resolve(Peer& l, const Inbound& in, const Frame& frame) {
  const auto within = [&](std::uint64_t size) {
    return frame.length <= size && frame.offset <= size - frame.length;
  };
  if (frame.location == in_frame) {
    return frame.length <= frame_inline_bytes ? frame.payload : nullptr;
  }
  if (frame.location == in_ring) {
    return within(in.ring_bytes) ? in.ring + frame.offset : nullptr;
  }
  auto it = l.mapped_segments.find(frame.location);
  if (it == l.mapped_segments.end()) {
    read_messages(l);  // its descriptor was sent before the frame
    it = l.mapped_segments.find(frame.location);
  }
  if (it == l.mapped_segments.end() || !within(it->second.size())) return nullptr;
  return it->second.data() + frame.offset;
}

void ShmTransport::consume(int peer, Channel lane, std::size_t bytes) {
  Peer& l = peer_at(peer);
  Inbound& in = l.in[static_cast<std::size_t>(lane)];
  require(bytes <= in.remaining, Errc::invalid_argument, "consume(", bytes, ") of the ", in.remaining,
          " bytes that peek() showed from rank ", peer);
  if (bytes == 0) return;
  in.at += bytes, in.remaining -= bytes, in.consumed += bytes;
  if (in.remaining == 0) {
    const Frame& frame = in.frames[in.next % in.frame_count];
    if (frame.location == in_ring)
      in.counters->ring_done.store(in.ring_done += round_up(frame.length, cache_line),
                                   std::memory_order_release);
    in.at = nullptr;
    in.counters->frames_done.store(++in.next, std::memory_order_release);
  }
  in.counters->consumed.store(in.consumed, std::memory_order_seq_cst);
  wake_if_sleeping(l);
}

/// Handles segments, releases of segments, and wait-for messages. A peer releases a segment only after its
/// references to it were consumed.
void ShmTransport::read_messages(Peer& l) {
  SocketMessage message{};
  UniqueFd fd;
  while (receive_message(l.socket.get(), message, fd)) {
    if (message.kind == SocketMessage::release) {
      l.mapped_segments.erase(message.number);
      continue;
    }
    if (message.kind == SocketMessage::wait) {
      wait_graph_.receive(l.rank, message.wait_message);
      continue;
    }
    require(static_cast<bool>(fd), Errc::system, "the descriptor of shared memory from rank ", l.rank,
            " was lost: too many files are open in this process; ulimit -n raises the limit");
    SharedMemory memory = SharedMemory::map(std::move(fd), true);
    memory.close_fd();
    l.mapped_segments.emplace(message.number, std::move(memory));
  }
}

// ---- waiting and failing ----

bool ShmTransport::changed() {
  bool any = false;
  for (auto& l : peers_) {
    for (auto& out : l->out) {
      const auto consumed = out.counters->consumed.load(std::memory_order_seq_cst);
      if (consumed != out.seen) out.seen = consumed, any = true;
    }
    for (auto& in : l->in) {
      in.seen = std::max(in.seen, in.next);
      while (in.seen - in.next < in.frame_count &&
             in.frames[in.seen % in.frame_count].ready.load(std::memory_order_seq_cst) == in.seen + 1)
        ++in.seen, any = true;
    }
    const Mailbox& place = *mailboxes_[l->mailbox_index].mailbox;
    if (const std::uint64_t news = mailbox_state(place); news != l->mailbox_seen)
      l->mailbox_seen = news, any = true;
  }
  return any;
}

void ShmTransport::wake_peers() {
  for (auto& l : peers_) wake_if_sleeping(*l);
}

std::optional<SharedMemoryHandle> ShmTransport::export_handle(std::span<const std::byte> bytes) {
  allocator_->refresh(segment_map_);
  if (exported_version_ != segment_map_.version) exported_ = {}, exported_version_ = segment_map_.version;
  for (const ExportedSegment& s : exported_)
    if (bytes.data() >= s.begin && bytes.data() + bytes.size() <= s.end) return s.handle(bytes.data());
  const auto segment = segment_map_.find(bytes.data(), bytes.size());
  if (!segment) return std::nullopt;
  for (auto& l : peers_)
    if (!send_segment(*l, *segment)) return std::nullopt;
  const std::byte* const begin = segment->memory.data();
  exported_[1] = std::exchange(exported_[0], {begin, begin + segment->memory.size(), segment->number});
  return exported_[0].handle(bytes.data());
}

std::byte* ShmTransport::map_handle(int peer, const SharedMemoryHandle& spot, std::size_t bytes) {
  Peer& l = peer_at(peer);
  auto it = l.mapped_segments.find(spot.segment);
  if (it == l.mapped_segments.end()) {
    read_messages(l);  // its descriptor was sent before the handle
    it = l.mapped_segments.find(spot.segment);
  }
  if (it == l.mapped_segments.end() || bytes > it->second.size() || spot.offset > it->second.size() - bytes)
    return nullptr;
  return it->second.data() + spot.offset;
}

CmaResult ShmTransport::cma_read(int peer, std::uint64_t address, std::span<std::byte> into) {
  const int error = cma_read_process(peer_at(peer).pid, address, into);
  if (error == 0) return CmaResult::done;
  if (error == ESRCH) return require_alive(peer), CmaResult::gone;  // its socket will show how it ended
  if (group_failure()) return CmaResult::gone;  // the peer may have freed its memory after it
  if (error == EPERM || error == EACCES || error == ENOSYS) return has_cma_ = false, CmaResult::refused;
  fail(Errc::system, "process_vm_readv of ", into.size(), " bytes at ", address, " of rank ", peer,
       ", process ", peer_at(peer).pid, ": ", std::strerror(error));
}

void ShmTransport::set_sleeping(bool asleep) {
  if (!header_) return;
  header_->sleeping.store(asleep, std::memory_order_seq_cst);
  if (asleep && asymmetric_fence_) heavy_fence();
}

std::optional<Failure> ShmTransport::poll_failures() {
  send_releases();
  std::optional<Failure> lost;
  for (auto& l : peers_) {
    if (!l->fd_events.events || l->departed) continue;
    const bool hung_up = l->fd_events.hung_up();
    l->fd_events.events = 0;
    read_messages(*l);
    if (!hung_up) continue;
    l->departed = true;
    poller_.remove(l->socket.get());
    if (l->header->state.load(std::memory_order_seq_cst) != State::departed && !lost)
      lost = Failure{l->rank, Errc::peer_lost,
                     concat("rank ", l->rank, " died: its process ended without leaving the group")};
  }
  return lost ? lost : local_failure_;
}

void ShmTransport::send_releases() {
  if (allocator_->has_released()) {
    std::vector<std::uint32_t> numbers;
    allocator_->drain_released(numbers);
    for (auto& l : peers_)
      for (const auto number : numbers)
        if (l->sent_segments.erase(number)) l->segments_to_release.push_back(number);
  }
  for (auto& l : peers_)
    while (!l->segments_to_release.empty() &&
           (l->departed ||
            send_message(l->socket.get(),
                         SocketMessage{SocketMessage::release, l->segments_to_release.back()}, -1)))
      l->segments_to_release.pop_back();
}

void ShmTransport::send_wait_message(int peer, const WaitMessage& note) {
  send_message(peer_at(peer).socket.get(), SocketMessage{.kind = SocketMessage::wait, .wait_message = note},
               -1);
}

void ShmTransport::fail_on_departed(const Peer& l) {
  if (!local_failure_)
    local_failure_ = Failure{l.rank, Errc::peer_lost,
                             concat("rank ", l.rank, " left the group, and rank ", rank_, " still needs it")};
}

void ShmTransport::protocol_error(const Peer& l, const Frame& frame) {
  if (!local_failure_)
    local_failure_ = Failure{l.rank, Errc::peer_lost,
                             concat("rank ", l.rank, " sent a damaged frame: length ", frame.length,
                                    ", place ", frame.location, ", offset ", frame.offset)};
}

std::optional<Failure> ShmTransport::group_failure() const {
  const std::uint32_t word = leader_ ? leader_->elected_rank.load(std::memory_order_acquire) : 0;
  if (!word) return std::nullopt;
  const int author = static_cast<int>(word) - 1;
  const Header* h = author == rank_ ? header_ : by_rank_[static_cast<std::size_t>(author)]->header;
  return Failure{h->culprit, static_cast<Errc>(h->code),
                 std::string(h->reason, strnlen(h->reason, sizeof h->reason))};
}

/// Each rank writes its own record and then competes for the leader's word with one compare-and-swap. So a
/// rank that dies while it writes its record does not block the others.
Failure ShmTransport::elect_failure(const Failure& failure) {
  if (!leader_) return failure;
  header_->culprit = failure.culprit;
  header_->code = static_cast<std::uint32_t>(failure.code);
  const std::size_t n = failure.reason.copy(header_->reason, sizeof header_->reason - 1);
  header_->reason[n] = 0;
  std::uint32_t nobody = 0;
  leader_->elected_rank.compare_exchange_strong(nobody, static_cast<std::uint32_t>(rank_) + 1);
  for (auto& l : peers_) Poller::ring_doorbell(l->doorbell.get());
  return *group_failure();
}

}  // namespace rz
