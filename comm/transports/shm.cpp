#include "comm/transports/shm.h"

#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <utility>

#include "comm/core/error.h"
#include "comm/core/rounding.h"
#include "comm/transports/barrier.h"
#include "comm/transports/process_memory.h"
#include "comm/transports/random.h"
#include "comm/transports/unix_socket.h"

namespace rz {

namespace shm {

constexpr std::uint64_t magic = 0x326f72657a676e72;  // "rngzero2"
constexpr std::size_t line = 64;
constexpr std::size_t inline_bytes = 24;
constexpr std::uint32_t in_frame = 0xffffffff, in_ring = 0xfffffffe;
constexpr std::size_t most_by_reference = std::size_t{1} << 30;

enum State : std::uint32_t { active = 0, left = 1 };

/// At the start of every rank's memory.
struct Header {
  std::uint64_t magic_word = magic;
  std::uint32_t rank = 0, ranks = 0;
  std::uint64_t ring_bytes = 0;    ///< of its meeting place
  std::uint32_t heavy_fences = 0;  ///< it makes them, and is reached by those of others
  JobId key{};                     ///< random
  std::uint64_t key_at = 0;        ///< of the rank's process, where it lies
  alignas(line) std::atomic<std::uint32_t> asleep{0};
  alignas(line) std::atomic<std::uint32_t> state{active};
  /// The leader's decides for the host: 1 + the rank whose record holds the group's first failure.
  std::atomic<std::uint32_t> verdict{0};
  std::int32_t culprit = -1;
  std::uint32_t code = 0;
  char reason[488] = {};
};

/// `ready` is the frame's number plus one, written last; the reader needs this one line to learn of it.
struct alignas(line) Frame {
  std::atomic<std::uint64_t> ready;
  Signature signature;
  std::uint32_t length;
  std::uint32_t where;  ///< in_frame, in_ring, or a segment's number
  union {
    std::uint64_t offset;
    std::byte payload[inline_bytes];
  };
};
static_assert(sizeof(Frame) == line && sizeof(Signature) == 24);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

/// Written by the reader of a channel.
struct alignas(line) Counters {
  std::atomic<std::uint64_t> frames_done, ring_done, consumed;
};

/// How a channel of one lane is cut. The rings shrink when many ranks share the host: the memory grows with
/// the square of their number.
struct Shape {
  std::size_t frames, ring;
  std::size_t bytes() const { return sizeof(Counters) + frames * sizeof(Frame) + ring; }
};
Shape shape(int lane, std::size_t ranks) {
  const std::size_t ring =
      std::clamp<std::size_t>((std::size_t{4} << 20) / ranks / 4096 * 4096, 16 << 10, 256 << 10);
  return lane == static_cast<int>(Lane::collective) ? Shape{256, ring} : Shape{64, ring / 4};
}

/// An odd number of lines beyond whole pages, so that channels do not compete for the same cache sets.
std::size_t stride(std::size_t ranks) {
  return round_up(shape(0, ranks).bytes() + shape(1, ranks).bytes(), 4096) + 13 * line;
}
constexpr std::size_t header_bytes = round_up(sizeof(Header), 4096) + line;

// The ring of a meeting place is skewed, so that it does not compete with whole pages for the same cache
// sets.
constexpr std::size_t ring_skew = 5 * line;
std::size_t meeting_at(std::size_t ranks) {
  return round_up(header_bytes + (ranks - 1) * stride(ranks), 4096);
}
std::size_t memory_bytes(std::size_t ranks, std::size_t ring_bytes) {
  return meeting_at(ranks) + round_up(sizeof(MeetingPlace), 4096) + ring_skew + ring_bytes;
}
MeetingView meeting_view(std::byte* memory, std::size_t ranks, std::size_t ring_bytes, bool fences) {
  std::byte* const at = memory + meeting_at(ranks);
  return {reinterpret_cast<MeetingPlace*>(at), at + round_up(sizeof(MeetingPlace), 4096) + ring_skew,
          ring_bytes, &reinterpret_cast<Header*>(memory)->asleep, fences};
}
/// Differs from what it was if the rank has offered or read anything since.
std::uint64_t news_of(const MeetingPlace& place) {
  return static_cast<std::uint64_t>(place.read.load(std::memory_order_seq_cst)) << 32 |
         place.written.load(std::memory_order_seq_cst);
}

struct Channel {
  Frame* frames;
  Counters* counters;
  std::byte* ring;
};
/// The channel of one lane in slot `slot` of the memory that starts with `header`.
Channel channel(Header* header, std::size_t slot, int lane, std::size_t ranks) {
  std::byte* at = reinterpret_cast<std::byte*>(header) + header_bytes + slot * stride(ranks);
  if (lane == 1) at += shape(0, ranks).bytes();
  auto* counters = reinterpret_cast<Counters*>(at);
  auto* frames = reinterpret_cast<Frame*>(at + sizeof(Counters));
  return {frames, counters, reinterpret_cast<std::byte*>(frames + shape(lane, ranks).frames)};
}

/// What travels on the unix sockets.
struct Message {
  enum Kind : std::uint32_t { segment, drop, wait_note } kind;
  std::uint32_t number = 0;
  WaitNote note = {};
};

}  // namespace shm

using namespace shm;

ShmLinks::ShmLinks(int rank, std::vector<int> ranks, std::size_t ring_bytes, Poller& poller,
                   WaitForGraph& waiting)
    : rank_(rank),
      ranks_(std::move(ranks)),
      poller_(poller),
      waiting_(waiting),
      address_("ringzero-" + random_hex()) {
  if (ranks_.size() < 2) return;
  listener_ = listen_unix(address_);
  memory_ = SharedMemory::create(memory_bytes(ranks_.size(), ring_bytes));
  header_ = new (memory_.data()) Header;
  header_->ring_bytes = ring_bytes;
  header_->rank = static_cast<std::uint32_t>(rank);
  header_->ranks = static_cast<std::uint32_t>(ranks_.size());
  header_->heavy_fences = register_for_heavy_fences();
  header_->key = random_id();
  header_->key_at = reinterpret_cast<std::uint64_t>(&header_->key);
}

void ShmLinks::connect(Introduction me, const std::vector<std::string>& addresses, Deadline deadline) {
  by_rank_.resize(addresses.size());
  if (ranks_.size() < 2) return;
  me.gifts = {memory_.fd(), poller_.doorbell()};
  std::vector<Connection> calls;
  std::vector<int> callers;
  for (const int peer : ranks_) {
    const auto& address = addresses[static_cast<std::size_t>(peer)];
    if (peer < rank_) calls.push_back({peer, 0, connect_unix(address, deadline), {}, address});
    if (peer > rank_) callers.push_back(peer);
  }
  for (auto& c : meet(me, listener_.get(), std::move(calls), callers, 1, deadline)) attach(std::move(c));
  listener_.close();
  memory_.close_fd();
  light_ = header_->heavy_fences;
  reads_peers_ = true;
  std::size_t ring_bytes = header_->ring_bytes;
  for (const auto& l : links_) {
    ring_bytes = std::min<std::size_t>(ring_bytes, l->header->ring_bytes);
    light_ = light_ && l->header->heavy_fences;
    reads_peers_ = reads_peers_ && finds(*l);
  }
  for (const int r : ranks_)
    meeting_.push_back(meeting_view(r == rank_ ? memory_.data() : link(r).memory.data(), ranks_.size(),
                                    ring_bytes, !light_));
  leader_ = ranks_.front() == rank_ ? header_ : link(ranks_.front()).header;
}

void ShmLinks::attach(Connection connection) {
  const std::size_t n = ranks_.size();
  require(
      connection.gifts.size() == 2, Errc::system, "rank ", connection.rank,
      " passed no shared memory: its or this process has too many files open (ulimit -n raises the limit)");
  auto fresh = std::make_unique<Link>();
  Link& l = *fresh;
  l.rank = connection.rank;
  l.memory = SharedMemory::map(std::move(connection.gifts[0]), true);
  l.memory.close_fd();
  l.doorbell = std::move(connection.gifts[1]);
  l.socket = std::move(connection.socket);
  l.process = process_of_peer(l.socket.get());
  l.header = reinterpret_cast<Header*>(l.memory.data());
  require(l.memory.size() >= sizeof(Header) && l.header->magic_word == magic &&
              l.header->rank == static_cast<std::uint32_t>(l.rank) && l.header->ranks == n &&
              l.memory.size() == memory_bytes(n, l.header->ring_bytes),
          Errc::rendezvous, "rank ", l.rank, " lays out shared memory in another way; is it the same build?");
  const auto slot = [&](int owner, int sender) {  // the owner has no channel to itself
    const auto of = [&](int r) { return std::find(ranks_.begin(), ranks_.end(), r) - ranks_.begin(); };
    return static_cast<std::size_t>(of(sender) - (sender > owner));
  };
  for (int lane = 0; lane < lane_count; ++lane) {
    const Shape s = shape(lane, n);
    const Channel in = channel(header_, slot(rank_, l.rank), lane, n);
    const Channel out = channel(l.header, slot(l.rank, rank_), lane, n);
    auto& i = l.in[static_cast<std::size_t>(lane)];
    auto& o = l.out[static_cast<std::size_t>(lane)];
    i.frames = in.frames, i.counters = in.counters, i.ring = in.ring;
    o.frames = out.frames, o.counters = out.counters, o.ring = out.ring;
    i.frame_count = o.frame_count = s.frames, i.ring_bytes = o.ring_bytes = s.ring;
  }
  l.place = static_cast<std::size_t>(std::find(ranks_.begin(), ranks_.end(), l.rank) - ranks_.begin());
  poller_.add(l.socket.get(), l.watched, EPOLLIN);
  l.watched.events = EPOLLIN;  // what came before the registration
  by_rank_[static_cast<std::size_t>(l.rank)] = &l;
  links_.push_back(std::move(fresh));
}

/// Whether the peer's process is the one that this number names here, and may be read.
bool ShmLinks::finds(const Link& l) const {
  JobId key{};
  const auto into = std::as_writable_bytes(std::span(key));
  return l.process > 0 && read_process(l.process, l.header->key_at, into) == 0 && key == l.header->key;
}

ShmLinks::~ShmLinks() {
  if (!creator_.here()) return;
  if (header_) header_->state.store(State::left, std::memory_order_seq_cst);
  for (auto& l : links_) {
    for (auto& out : l->out) {
      collect(*l, out);
      for (auto& r : out.references) r.segment->memory.promise();
    }
    poller_.remove(l->socket.get());
    l->socket.close();  // wakes the peer, too
  }
}

// ---- sending ----

namespace {

/// Publishes frame number `number`; all but `ready` is written.
void publish(Frame& frame, std::uint64_t number) { frame.ready.store(number + 1, std::memory_order_seq_cst); }

}  // namespace

std::size_t ShmLinks::post(int peer, Lane lane, const Signature& signature,
                           std::span<const std::byte> bytes) {
  Link& l = link(peer);
  if (l.gone) return want(l), 0;
  Outbound& out = l.out[static_cast<std::size_t>(lane)];
  std::shared_ptr<Segment> segment;
  // What is shorter is copied sooner than a reference to it is given back.
  if (bytes.size() >= out.ring_bytes / 2) {
    arena_->refresh(map_);
    segment = map_.find(bytes.data(), bytes.size());
    if (segment && !announce(l, *segment)) segment = nullptr;
  }
  const std::size_t taken = segment ? post_by_reference(l, out, signature, bytes, std::move(segment))
                                    : post_copy(out, signature, bytes);
  if (taken) ring_if_asleep(l);
  return taken;
}

namespace {

bool frame_free(std::uint64_t posted, std::uint64_t count, std::uint64_t& done, const Counters& counters) {
  if (posted - done < count) return true;
  done = counters.frames_done.load(std::memory_order_acquire);
  return posted - done < count;
}

}  // namespace

std::size_t ShmLinks::post_by_reference(Link& l, Outbound& out, const Signature& signature,
                                        std::span<const std::byte> bytes, std::shared_ptr<Segment> segment) {
  collect(l, out);
  if (!frame_free(out.posted, out.frame_count, out.frames_done, *out.counters)) return 0;
  const std::size_t taken = std::min(bytes.size(), most_by_reference);
  Frame& frame = out.frames[out.posted % out.frame_count];
  frame.signature = signature;
  frame.length = static_cast<std::uint32_t>(taken);
  frame.where = segment->number;
  frame.offset = static_cast<std::uint64_t>(bytes.data() - segment->memory.data());
  out.references.push_back({out.taken, out.taken + taken, std::move(segment)});
  out.taken += taken;
  publish(frame, out.posted++);
  return taken;
}

/// In pieces of at most a quarter of the ring, so that the reader works on one while the next is copied.
/// Pieces end at multiples of a cache line from the start of the post, and so never within an element.
std::size_t ShmLinks::post_copy(Outbound& out, const Signature& signature, std::span<const std::byte> bytes) {
  std::size_t taken = 0;
  while (taken < bytes.size() && frame_free(out.posted, out.frame_count, out.frames_done, *out.counters)) {
    const auto rest = bytes.subspan(taken);
    Frame& frame = out.frames[out.posted % out.frame_count];
    std::size_t piece = rest.size();
    if (piece <= inline_bytes) {
      std::memcpy(frame.payload, rest.data(), piece);
      frame.where = in_frame;
    } else {
      const std::uint64_t at = out.ring_posted % out.ring_bytes;
      if (out.ring_posted - out.ring_done + std::min<std::uint64_t>(piece, out.ring_bytes / 4) >
          out.ring_bytes)
        out.ring_done = out.counters->ring_done.load(std::memory_order_acquire);
      const std::uint64_t room = std::min(
          {out.ring_bytes - (out.ring_posted - out.ring_done), out.ring_bytes - at, out.ring_bytes / 4});
      if (piece > room) piece = room / line * line;
      if (piece == 0) break;
      std::memcpy(out.ring + at, rest.data(), piece);
      frame.where = in_ring;
      frame.offset = at;
      out.ring_posted += round_up(piece, line);
    }
    frame.signature = signature;
    frame.length = static_cast<std::uint32_t>(piece);
    publish(frame, out.posted++);
    taken += piece;
  }
  out.taken += taken;
  return taken;
}

void ShmLinks::ring_if_asleep(Link& l) {
  auto& asleep = l.header->asleep;
  if (asleep.load(std::memory_order_seq_cst) && asleep.exchange(0)) Poller::ring(l.doorbell.get());
}

/// Gives the peer the segment's descriptor on first use. False if its socket is full now: then bytes are
/// copied.
bool ShmLinks::announce(Link& l, const Segment& segment) {
  if (l.announced.count(segment.number)) return true;
  if (!send_message(l.socket.get(), Message{Message::segment, segment.number}, segment.memory.fd()))
    return false;
  l.announced.insert(segment.number);
  return true;
}

void ShmLinks::collect(Link& l, Outbound& out) {
  if (out.references.empty()) return;
  const std::uint64_t consumed = out.counters->consumed.load(std::memory_order_acquire);
  while (!out.references.empty() && out.references.front().end <= consumed) out.references.pop_front();
  if (!out.references.empty() && l.gone) want(l);
}

std::uint64_t ShmLinks::released(int peer, Lane lane) {
  Link& l = link(peer);
  Outbound& out = l.out[static_cast<std::size_t>(lane)];
  collect(l, out);
  if (out.references.empty()) return out.taken;
  return std::max(out.references.front().begin, out.counters->consumed.load(std::memory_order_acquire));
}

// ---- receiving ----

Incoming ShmLinks::peek(int peer, Lane lane) {
  Link& l = link(peer);
  Inbound& in = l.in[static_cast<std::size_t>(lane)];
  const Frame& frame = in.frames[in.next % in.frame_count];
  if (!in.at) {
    if (frame.ready.load(std::memory_order_acquire) != in.next + 1) {
      if (l.gone) want(l);
      return {};
    }
    in.at = resolve(l, in, frame);
    if (!in.at) return damaged(l, frame), Incoming{};
    in.left = frame.length;
  }
  return {frame.signature, {in.at, in.left}};
}

/// Where the frame's bytes lie in this process; null if they are not within what was mapped.
const std::byte* ShmLinks::resolve(Link& l, const Inbound& in, const Frame& frame) {
  const auto within = [&](std::uint64_t size) {
    return frame.length <= size && frame.offset <= size - frame.length;
  };
  if (frame.where == in_frame) {
    return frame.length <= inline_bytes ? frame.payload : nullptr;
  }
  if (frame.where == in_ring) {
    return within(in.ring_bytes) ? in.ring + frame.offset : nullptr;
  }
  auto it = l.segments.find(frame.where);
  if (it == l.segments.end()) {
    read_messages(l);  // its descriptor was sent before the frame
    it = l.segments.find(frame.where);
  }
  if (it == l.segments.end() || !within(it->second.size())) return nullptr;
  return it->second.data() + frame.offset;
}

void ShmLinks::consume(int peer, Lane lane, std::size_t bytes) {
  Link& l = link(peer);
  Inbound& in = l.in[static_cast<std::size_t>(lane)];
  require(bytes <= in.left, Errc::invalid_argument, "consume(", bytes, ") of the ", in.left,
          " bytes that peek() showed from rank ", peer);
  if (bytes == 0) return;
  in.at += bytes, in.left -= bytes, in.consumed += bytes;
  if (in.left == 0) {
    const Frame& frame = in.frames[in.next % in.frame_count];
    if (frame.where == in_ring)
      in.counters->ring_done.store(in.ring_done += round_up(frame.length, line), std::memory_order_release);
    in.at = nullptr;
    in.counters->frames_done.store(++in.next, std::memory_order_release);
  }
  in.counters->consumed.store(in.consumed, std::memory_order_seq_cst);
  ring_if_asleep(l);
}

/// Segments that the peer gives, and those that it takes back, which are only such as were consumed; and
/// notes.
void ShmLinks::read_messages(Link& l) {
  Message message{};
  Descriptor fd;
  while (receive_message(l.socket.get(), message, fd)) {
    if (message.kind == Message::drop) {
      l.segments.erase(message.number);
      continue;
    }
    if (message.kind == Message::wait_note) {
      waiting_.hear(l.rank, message.note);
      continue;
    }
    require(static_cast<bool>(fd), Errc::system, "the descriptor of shared memory from rank ", l.rank,
            " was lost: too many files are open in this process; ulimit -n raises the limit");
    SharedMemory memory = SharedMemory::map(std::move(fd), true);
    memory.close_fd();
    l.segments.emplace(message.number, std::move(memory));
  }
}

// ---- waiting and failing ----

bool ShmLinks::changed() {
  bool any = false;
  for (auto& l : links_) {
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
    const MeetingPlace& place = *meeting_[l->place].place;
    if (const std::uint64_t news = news_of(place); news != l->met) l->met = news, any = true;
  }
  return any;
}

void ShmLinks::nudge() {
  for (auto& l : links_) ring_if_asleep(*l);
}

std::optional<SharedSpot> ShmLinks::share(std::span<const std::byte> bytes) {
  arena_->refresh(map_);
  if (shared_version_ != map_.version) shared_ = {}, shared_version_ = map_.version;
  for (const Shared& s : shared_)
    if (bytes.data() >= s.begin && bytes.data() + bytes.size() <= s.end) return s.spot(bytes.data());
  const auto segment = map_.find(bytes.data(), bytes.size());
  if (!segment) return std::nullopt;
  for (auto& l : links_)
    if (!announce(*l, *segment)) return std::nullopt;
  const std::byte* const begin = segment->memory.data();
  shared_[1] = std::exchange(shared_[0], {begin, begin + segment->memory.size(), segment->number});
  return shared_[0].spot(bytes.data());
}

std::byte* ShmLinks::reach(int peer, const SharedSpot& spot, std::size_t bytes) {
  Link& l = link(peer);
  auto it = l.segments.find(spot.segment);
  if (it == l.segments.end()) {
    read_messages(l);  // its descriptor was sent before the letter
    it = l.segments.find(spot.segment);
  }
  if (it == l.segments.end() || bytes > it->second.size() || spot.offset > it->second.size() - bytes)
    return nullptr;
  return it->second.data() + spot.offset;
}

PeerRead ShmLinks::read(int peer, std::uint64_t address, std::span<std::byte> into) {
  const int error = read_process(link(peer).process, address, into);
  if (error == 0) return PeerRead::done;
  if (error == ESRCH) return need(peer), PeerRead::gone;  // its socket tells how it went
  if (verdict()) return PeerRead::gone;                   // it may have given its memory up for that
  if (error == EPERM || error == EACCES || error == ENOSYS) return reads_peers_ = false, PeerRead::refused;
  fail(Errc::system, "process_vm_readv of ", into.size(), " bytes at ", address, " of rank ", peer,
       ", process ", link(peer).process, ": ", std::strerror(error));
}

void ShmLinks::set_asleep(bool asleep) {
  if (!header_) return;
  header_->asleep.store(asleep, std::memory_order_seq_cst);
  if (asleep && light_) heavy_fence();
}

std::optional<Failure> ShmLinks::look() {
  send_drops();
  std::optional<Failure> lost;
  for (auto& l : links_) {
    if (!l->watched.events || l->gone) continue;
    const bool hung_up = l->watched.hung_up();
    l->watched.events = 0;
    read_messages(*l);
    if (!hung_up) continue;
    l->gone = true;
    poller_.remove(l->socket.get());
    if (l->header->state.load(std::memory_order_seq_cst) != State::left && !lost)
      lost = Failure{l->rank, Errc::peer_lost,
                     str("rank ", l->rank, " died: its process ended without leaving the group")};
  }
  return lost ? lost : wanted_;
}

void ShmLinks::send_drops() {
  if (arena_->has_dropped()) {
    std::vector<std::uint32_t> numbers;
    arena_->take_dropped(numbers);
    for (auto& l : links_)
      for (const auto number : numbers)
        if (l->announced.erase(number)) l->to_drop.push_back(number);
  }
  for (auto& l : links_)
    while (!l->to_drop.empty() &&
           (l->gone || send_message(l->socket.get(), Message{Message::drop, l->to_drop.back()}, -1)))
      l->to_drop.pop_back();
}

void ShmLinks::tell(int peer, const WaitNote& note) {
  send_message(link(peer).socket.get(), Message{.kind = Message::wait_note, .note = note}, -1);
}

void ShmLinks::want(const Link& l) {
  if (!wanted_)
    wanted_ = Failure{l.rank, Errc::peer_lost,
                      str("rank ", l.rank, " left the group, and rank ", rank_, " still needs it")};
}

void ShmLinks::damaged(const Link& l, const Frame& frame) {
  if (!wanted_)
    wanted_ = Failure{l.rank, Errc::peer_lost,
                      str("rank ", l.rank, " sent a damaged frame: length ", frame.length, ", place ",
                          frame.where, ", offset ", frame.offset)};
}

std::optional<Failure> ShmLinks::verdict() const {
  const std::uint32_t word = leader_ ? leader_->verdict.load(std::memory_order_acquire) : 0;
  if (!word) return std::nullopt;
  const int author = static_cast<int>(word) - 1;
  const Header* h = author == rank_ ? header_ : by_rank_[static_cast<std::size_t>(author)]->header;
  return Failure{h->culprit, static_cast<Errc>(h->code),
                 std::string(h->reason, strnlen(h->reason, sizeof h->reason))};
}

/// Each rank writes its own record and then competes for the leader's word, so that nobody can die in the
/// middle of writing what others wait for.
Failure ShmLinks::agree(const Failure& failure) {
  if (!leader_) return failure;
  header_->culprit = failure.culprit;
  header_->code = static_cast<std::uint32_t>(failure.code);
  const std::size_t n = failure.reason.copy(header_->reason, sizeof header_->reason - 1);
  header_->reason[n] = 0;
  std::uint32_t nobody = 0;
  leader_->verdict.compare_exchange_strong(nobody, static_cast<std::uint32_t>(rank_) + 1);
  for (auto& l : links_) Poller::ring(l->doorbell.get());
  return *verdict();
}

}  // namespace rz
