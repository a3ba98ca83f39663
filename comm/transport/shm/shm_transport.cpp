#include "comm/transport/shm/shm_transport.h"

#include <utility>

#include "comm/core/error.h"
#include "comm/net/random.h"
#include "comm/net/unix_socket.h"
#include "comm/os/fd.h"

namespace rz {

// ---- connecting ----

// Each peer has a socket, a doorbell and, until it is mapped, memory. Further: listener, memory, segments.
std::size_t ShmTransport::files_for(std::size_t peers) { return peers ? 3 * peers + 8 : 0; }

ShmTransport::ShmTransport(std::shared_ptr<LinkMonitor> group_monitor, std::vector<int> ranks,
                           std::size_t ring_bytes, std::shared_ptr<SharedMemoryAllocator> memory)
    : MonitoredTransport(std::move(group_monitor)),
      ranks_(std::move(ranks)),
      address_("ringzero-" + net::random_hex()) {
  if (ranks_.size() < 2) return;
  std::vector<int> peers = ranks_;
  std::erase(peers, monitor().rank());
  monitor().add(*this, peers, LinkData::memory);
  require_open_files(files_for(peers.size()),
                     concat("rank ", monitor().rank(), ": shared memory with ", peers.size(), " ranks"),
                     ", or end communicators that are no longer used");
  listener_ = net::listen_unix(address_);
  group_ = std::make_unique<SharedMemoryGroup>(monitor(), ranks_, ring_bytes,
                                               ranks_.size() == monitor().nodes().size(), std::move(memory));
}

ShmTransport::Streams::Streams(SharedMemoryGroup& group, ShmPeer& p)
    : peer(p),
      out{shm::Sender(group.outgoing(p, 0)), shm::Sender(group.outgoing(p, 1))},
      in{shm::Receiver(group.incoming(p, 0)), shm::Receiver(group.incoming(p, 1))} {}

void ShmTransport::connect(const net::HandshakeInfo& rank, const std::vector<std::string>& addresses,
                           Deadline deadline) {
  by_rank_.resize(addresses.size());
  if (!group_) return;
  net::HandshakeInfo me = rank;
  me.passed_fds = group_->passed_fds();
  std::vector<net::Connection> calls;
  std::vector<int> callers;
  for (const int peer : ranks_) {
    const auto& address = addresses[static_cast<std::size_t>(peer)];
    if (peer < me.rank) try {
        calls.push_back({peer, 0, net::connect_unix(address, deadline), {}, address});
      } catch (const Error& e) {
        throw Error(e.code(), concat("rank ", me.rank, " cannot connect to rank ", peer, ": ", e.what()),
                    peer);
      }
    if (peer > me.rank) callers.push_back(peer);
  }
  group_->attach(net::handshake(me, listener_.get(), std::move(calls), callers, 1, deadline));
  listener_.close();
  for (const auto& peer : group_->peers()) {
    streams_.push_back(std::make_unique<Streams>(*group_, *peer));
    by_rank_[static_cast<std::size_t>(peer->rank)] = streams_.back().get();
  }
}

ShmTransport::~ShmTransport() {
  if (!creator_.is_this_process() || !group_) return;
  for (auto& s : streams_)
    for (auto& out : s->out) out.keep_references_for_peer();
  group_->depart();
}

// ---- streams ----

std::size_t ShmTransport::post(int peer, Channel channel, const CallSignature& signature,
                               std::span<const std::byte> bytes) {
  Streams& s = streams_of(peer);
  if (s.peer.departed) return monitor().report_departed(peer), 0;
  shm::Sender& out = s.out[static_cast<std::size_t>(channel)];
  std::shared_ptr<Segment> segment;
  if (out.prefers_reference(bytes.size())) segment = group_->sent_segment(s.peer, bytes);
  const std::size_t taken =
      segment ? out.post_by_reference(signature, bytes, std::move(segment)) : out.post_copy(signature, bytes);
  if (taken) s.peer.wake_if_sleeping();
  return taken;
}

std::uint64_t ShmTransport::released(int peer, Channel channel) {
  Streams& s = streams_of(peer);
  shm::Sender& out = s.out[static_cast<std::size_t>(channel)];
  const std::uint64_t released = out.released();
  if (out.has_references() && s.peer.departed) monitor().report_departed(peer);
  return released;
}

ReceiveView ShmTransport::peek(int peer, Channel channel) {
  Streams& s = streams_of(peer);
  shm::Receiver& in = s.in[static_cast<std::size_t>(channel)];
  const ReceiveView view = in.peek(s.peer.socket);
  if (view.bytes.empty() && (s.peer.departed || in.damaged())) [[unlikely]]
    report_missing(s.peer, in);
  return view;
}

/// This rank needs bytes of a peer that has departed or has sent a damaged frame.
void ShmTransport::report_missing(const ShmPeer& peer, const shm::Receiver& in) {
  if (const shm::Frame* frame = in.damaged())
    monitor().report({peer.rank, Errc::peer_lost,
                      concat("rank ", peer.rank, " sent a damaged frame: length ", frame->length,
                             ", location ", frame->location, ", offset ", frame->offset)});
  else
    monitor().report_departed(peer.rank);
}

void ShmTransport::consume(int peer, Channel channel, std::size_t bytes) {
  Streams& s = streams_of(peer);
  shm::Receiver& in = s.in[static_cast<std::size_t>(channel)];
  require(bytes <= in.shown(), Errc::invalid_argument, "consume(", bytes, ") of the ", in.shown(),
          " bytes that peek() showed from rank ", peer);
  if (bytes == 0) return;
  in.consume(bytes);
  s.peer.wake_if_sleeping();
}

// ---- waiting and failures ----

bool ShmTransport::changed() {
  bool any = group_->changed();
  for (auto& s : streams_) {
    for (auto& out : s->out) any |= out.changed();
    for (auto& in : s->in) any |= in.changed();
  }
  return any;
}

void ShmTransport::set_sleeping(bool asleep) { group_->set_sleeping(asleep); }

std::optional<Failure> ShmTransport::poll_failures() { return group_->poll(); }

std::optional<Failure> ShmTransport::group_failure() const { return group_->election().elected(); }

Failure ShmTransport::spread_failure(const Failure& failure) {
  const Failure first = group_->election().elect(failure);
  for (const auto& peer : group_->peers()) net::Poller::ring_doorbell(peer->doorbell.get());
  return first;
}

void ShmTransport::add_pulses(std::vector<Pulse>& pulses) const {
  const auto now = std::chrono::steady_clock::now();
  for (const auto& peer : group_->peers())
    if (peer->header()->state.load() != shm::State::departed)
      pulses.push_back({peer->rank, peer->header()->beats.load(std::memory_order_relaxed), now, peer->pid});
}

/// A process that has ended is found by its socket. One that is ready waits for a processor of a busy host.
std::optional<Failure> ShmTransport::judge_silence(const Pulse& pulse,
                                                   std::chrono::duration<double> silence) const {
  const ProcessState state = process_state(pulse.process);
  if (state.traced || state.ready || state.code == 'Z' || state.code == 'X') return std::nullopt;
  const std::string reason = state.code == 'T' ? "was stopped by a signal (SIGSTOP, SIGTSTP)"
                                               : "does not run: its control group is frozen, or the kernel "
                                                 "does not let it go on";
  return Failure{pulse.rank, Errc::peer_lost,
                 concat("rank ", pulse.rank, " (process ", pulse.process, ") ", reason,
                        "; it has shown no sign of life for ", rounded(silence.count(), 2), " s")};
}

void ShmTransport::send_wait_message(int peer, const WaitMessage& message) {
  group_->peer_at(peer).socket.send(message);
}

}  // namespace rz
