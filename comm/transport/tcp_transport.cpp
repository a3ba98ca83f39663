#include "comm/transport/tcp_transport.h"

#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "comm/core/error.h"
#include "comm/os/open_files.h"

namespace rz {

using tcp::ControlFrame;
using tcp::DataSocket;
using tcp::FrameHeader;

namespace {

/// Size of the first read of a frame: its header, and all of a small frame. The rest of a long frame is read
/// directly into its destination.
constexpr std::size_t first_read_bytes = 4096;
/// Frames of up to this size are assembled in one buffer before they are sent.
constexpr std::size_t coalesce_below = 2048;
constexpr std::size_t buffered_read_bytes = 64 << 10;
constexpr std::size_t read_buffer_bytes = buffered_read_bytes + first_read_bytes;
/// If peek() has fewer bytes than this, it first reads more of the frame from the socket.
constexpr std::size_t min_read = 16 << 10;
/// peek() returns incomplete frames up to a multiple of this, so that no element is split.
constexpr std::size_t element_alignment = 64;
/// Limit of one receive(), so that a fast peer does not starve the others.
constexpr std::size_t max_receive_bytes = 1 << 20;
/// Unsent bytes that the kernel queues per socket: enough to keep the network busy. With more, blocks would
/// wait in the queue of one socket while another has already sent the blocks after them.
constexpr int max_unsent_bytes = 256 << 10;
/// A host that acknowledges no control data for this long is lost.
constexpr auto max_silence = std::chrono::seconds(10);
/// Time for a departure notice to arrive after a data socket has ended.
constexpr auto departure_grace = std::chrono::milliseconds(500);

constexpr int first_data_socket = 1;  // index 0: control, 1: point_to_point, from 2 on: collective

bool would_block() { return errno == EAGAIN || errno == EWOULDBLOCK; }

}  // namespace

TcpTransport::TcpTransport(int rank, std::vector<int> peers, int sockets, std::string congestion,
                           const SocketAddress& bind_to, Poller& poller, WaitForGraph& waiting)
    : rank_(rank),
      peer_ranks_(std::move(peers)),
      sockets_(sockets),
      congestion_control_(std::move(congestion)),
      poller_(poller),
      wait_graph_(waiting) {
  if (peer_ranks_.empty()) return;
  require_open_files(peer_ranks_.size() * static_cast<std::size_t>(sockets_ + 2),
                     concat("rank ", rank_, ": TCP to ", peer_ranks_.size(), " ranks"),
                     ", or lower RZ_SOCKETS");
  listener_ = listen_tcp(bind_to);
  set_congestion_control(listener_.get(), congestion_control_);
  address_ = local_address(listener_.get()).text();
}

void TcpTransport::connect(const HandshakeInfo& me, const std::vector<std::string>& addresses,
                           Deadline deadline) {
  by_rank_.resize(addresses.size());
  if (peer_ranks_.empty()) return;
  std::vector<Connection> calls;
  std::vector<int> callers;
  for (const int peer : peer_ranks_) {
    peers_.push_back(std::make_unique<Peer>());
    Peer& l = *peers_.back();
    l.rank = peer;
    l.channels[static_cast<std::size_t>(Channel::collective)].data_sockets =
        std::vector<DataSocket>(static_cast<std::size_t>(sockets_));
    l.channels[static_cast<std::size_t>(Channel::point_to_point)].data_sockets = std::vector<DataSocket>(1);
    by_rank_[static_cast<std::size_t>(peer)] = &l;
    if (peer > rank_) callers.push_back(peer);
    if (peer > rank_) continue;
    const auto& address = addresses[static_cast<std::size_t>(peer)];
    const SocketAddress at = resolve(parse_host_port(address)).front();
    for (int i = 0; i < sockets_ + 2; ++i)
      calls.push_back({peer, i, start_connect(at, congestion_control_), {}, address});
  }
  for (auto& c : handshake(me, listener_.get(), std::move(calls), callers, sockets_ + 2, deadline))
    attach(std::move(c));
  listener_.close();
}

void TcpTransport::attach(Connection c) {
  Peer& l = peer_at(c.rank);
  set_tcp_options(c.socket.get());
  if (c.index < first_data_socket) {
    l.control = std::move(c.socket);
    limit_unacknowledged(l.control.get(), max_silence);
    l.fd_events.events = EPOLLIN;  // data may have arrived before the registration
    return poller_.add(l.control.get(), l.fd_events, EPOLLIN);
  }
  const bool p2p = c.index == first_data_socket;
  auto& lane = l.channels[static_cast<std::size_t>(p2p ? Channel::point_to_point : Channel::collective)];
  DataSocket& w = lane.data_sockets[p2p ? 0 : static_cast<std::size_t>(c.index - first_data_socket - 1)];
  w.socket = std::move(c.socket);
  limit_unsent(w.socket.get(), max_unsent_bytes);
  w.fd_events.events = EPOLLIN | EPOLLOUT;
  poller_.add(w.socket.get(), w.fd_events, EPOLLIN | EPOLLOUT);
}

TcpTransport::~TcpTransport() {
  if (!creator_.is_this_process()) return;  // the parent still uses the sockets and the epoll instance
  ControlFrame goodbye;
  for (auto& l : peers_) {
    if (l->control) send_control(*l, goodbye, true);
    const auto end = [&](UniqueFd& socket) {
      if (!socket) return;
      poller_.remove(socket.get());
      shutdown(socket.get(), SHUT_WR);
      socket.close();
    };
    end(l->control);
    for (auto& lane : l->channels)
      for (auto& w : lane.data_sockets) end(w.socket);
  }
}

// ---- sending ----

/// A writable socket without an unfinished frame, or null. Striped posts use the sockets in turn. Short posts
/// use the first socket, so that they arrive in order.
DataSocket* TcpTransport::free_data_socket(ChannelState& lane, bool striped) {
  const std::size_t n = striped ? lane.data_sockets.size() : 1;
  for (std::size_t i = 0; i < n; ++i) {
    DataSocket& w = lane.data_sockets[striped ? (lane.next_socket + i) % n : 0];
    if (w.busy) flush(w);
    if (w.busy || w.write_closed || !w.fd_events.writable()) continue;
    if (striped) lane.next_socket = (lane.next_socket + i + 1) % n;
    return &w;
  }
  return nullptr;
}

std::size_t TcpTransport::post(int peer, Channel which, const CallSignature& signature,
                               std::span<const std::byte> bytes) {
  Peer& l = peer_at(peer);
  if (l.departed) return fail_on_departed(l), 0;
  ChannelState& lane = l.channels[static_cast<std::size_t>(which)];
  const bool striped = bytes.size() >= tcp::max_frame_bytes;
  std::size_t taken = 0;
  while (taken < bytes.size()) {
    DataSocket* w = free_data_socket(lane, striped);
    if (!w) break;
    w->out_header.length = static_cast<std::uint32_t>(std::min(bytes.size() - taken, tcp::max_frame_bytes));
    w->out_header.offset = lane.accepted;
    w->out_header.signature = signature;
    w->payload = bytes.data() + taken;
    w->sent = 0;
    flush(*w);
    if (w->sent == 0 && w->busy) {  // the kernel took nothing, so nothing is accepted
      w->busy = false;
      continue;
    }
    taken += w->out_header.length;
    lane.accepted += w->out_header.length;
  }
  return taken;
}

/// Sends a small frame as one buffer, which costs the kernel less than two.
ssize_t TcpTransport::send_small_frame(const DataSocket& w) {
  std::array<std::byte, coalesce_below> frame;
  std::memcpy(frame.data(), &w.out_header, sizeof(FrameHeader));
  std::memcpy(frame.data() + sizeof(FrameHeader), w.payload, w.out_header.length);
  return send(w.socket.get(), frame.data(), sizeof(FrameHeader) + w.out_header.length,
              MSG_NOSIGNAL | MSG_DONTWAIT);
}

ssize_t TcpTransport::send_remaining(DataSocket& w) {
  iovec parts[2];
  int n = 0;
  if (w.sent < sizeof(FrameHeader))
    parts[n++] = {reinterpret_cast<char*>(&w.out_header) + w.sent, sizeof(FrameHeader) - w.sent};
  const std::size_t skip = w.sent > sizeof(FrameHeader) ? w.sent - sizeof(FrameHeader) : 0;
  parts[n++] = {const_cast<std::byte*>(w.payload) + skip, w.out_header.length - skip};
  msghdr message{};
  message.msg_iov = parts, message.msg_iovlen = static_cast<std::size_t>(n);
  return sendmsg(w.socket.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

/// Sends the rest of the frame; `busy` is set if some of it remains.
void TcpTransport::flush(DataSocket& w) {
  const std::size_t total = sizeof(FrameHeader) + w.out_header.length;
  w.busy = true;
  if (w.write_closed || !w.fd_events.writable()) return;
  const ssize_t sent = w.sent == 0 && total <= coalesce_below ? send_small_frame(w) : send_remaining(w);
  if (sent > 0) w.sent += static_cast<std::size_t>(sent);
  w.busy = w.sent < total;
  if (sent < 0 && !would_block() && errno != EINTR) w.write_closed = true;  // see check_lost()
  // Short write: the socket is full. epoll reports EPOLLOUT once it has space again.
  if (w.busy && (sent >= 0 || would_block())) w.fd_events.events &= ~static_cast<std::uint32_t>(EPOLLOUT);
}

std::uint64_t TcpTransport::released(int peer, Channel which) {
  ChannelState& lane = peer_at(peer).channels[static_cast<std::size_t>(which)];
  std::uint64_t released = lane.accepted;
  for (const DataSocket& w : lane.data_sockets)
    if (w.busy)
      released = std::min(
          released, w.out_header.offset + (w.sent > sizeof(FrameHeader) ? w.sent - sizeof(FrameHeader) : 0));
  return released;
}

// ---- receiving ----

/// Reads at most `most` available bytes and appends them to the buffer.
void TcpTransport::fill_buffer(DataSocket& w, std::size_t most) {
  if (w.read_closed || !w.fd_events.readable()) return;
  if (w.read_buffer.empty()) w.read_buffer.resize(read_buffer_bytes);
  if (w.read_begin) {  // only a few bytes remain here
    std::memmove(w.read_buffer.data(), w.read_buffer.data() + w.read_begin, w.read_end - w.read_begin);
    w.read_end -= w.read_begin, w.read_begin = 0;
  }
  const iovec part{w.read_buffer.data() + w.read_end, std::min(most, w.read_buffer.size() - w.read_end)};
  w.read_end += read_into(w, {&part, 1});
}

/// One read; updates fd_events and read_closed.
std::size_t TcpTransport::read_into(DataSocket& w, std::span<const iovec> parts) {
  std::size_t requested = 0;
  for (const iovec& part : parts) requested += part.iov_len;
  const ssize_t n = parts.size() == 1
                        ? recv(w.socket.get(), parts[0].iov_base, parts[0].iov_len, MSG_DONTWAIT)
                        : readv(w.socket.get(), parts.data(), static_cast<int>(parts.size()));
  const bool nothing = n < 0 && would_block();
  if (n == 0 || (n < 0 && !nothing && errno != EINTR)) w.read_closed = true;
  // Short read: no more is available, and epoll reports EPOLLIN when there is. A hang-up is reported only
  // once, so the bit stays set after it.
  if (nothing || (n > 0 && static_cast<std::size_t>(n) < requested && !w.fd_events.hung_up()))
    w.fd_events.events &= ~static_cast<std::uint32_t>(EPOLLIN);
  return n > 0 ? static_cast<std::size_t>(n) : 0;
}

bool TcpTransport::read_header(Peer& l, ChannelState& lane, DataSocket& w) {
  if (w.has_header) return true;
  if (w.read_end - w.read_begin < sizeof(FrameHeader))
    fill_buffer(w, lane.peeked ? buffered_read_bytes : first_read_bytes);
  if (w.read_end - w.read_begin < sizeof(FrameHeader)) return false;
  std::memcpy(&w.in_header, w.read_buffer.data() + w.read_begin, sizeof(FrameHeader));
  if (w.in_header.magic != tcp::frame_magic || w.in_header.length == 0 ||
      w.in_header.length > tcp::max_frame_bytes || w.in_header.offset < lane.consumed) {
    protocol_error(l, w, lane);
    return false;
  }
  w.read_begin += sizeof(FrameHeader);
  w.has_header = true;
  w.consumed = 0;
  return true;
}

void TcpTransport::protocol_error(const Peer& l, const DataSocket& w, const ChannelState& lane) {
  if (!local_failure_)
    local_failure_ = Failure{
        l.rank, Errc::peer_lost,
        concat("rank ", l.rank, " sent a damaged frame: magic ", w.in_header.magic, ", length ",
               w.in_header.length, ", offset ", w.in_header.offset, " where ", lane.consumed, " was due")};
}

/// The socket whose front frame continues the stream, or null. Each socket's frames are in stream order, so
/// the next one is at the front of some socket.
DataSocket* TcpTransport::front_socket(Peer& l, ChannelState& lane) {
  if (lane.front_socket) return lane.front_socket;
  bool open = false, whole = true;
  for (DataSocket& w : lane.data_sockets) {
    if (read_header(l, lane, w) && w.in_header.offset == lane.consumed) return lane.front_socket = &w;
    open |= !w.read_closed;
    whole &= w.has_header;
  }
  if (whole) protocol_error(l, lane.data_sockets.front(), lane);  // all front frames have later offsets
  if (!open && l.departed) fail_on_departed(l);
  return nullptr;
}

ReceiveView TcpTransport::peek(int peer, Channel which) {
  Peer& l = peer_at(peer);
  ChannelState& lane = l.channels[static_cast<std::size_t>(which)];
  DataSocket* w = front_socket(l, lane);
  if (!w) return {};
  const auto piece = [&] {
    const std::size_t rest = w->in_header.length - w->consumed, here = w->read_end - w->read_begin;
    if (here >= rest) return rest;
    const std::size_t whole = (w->consumed + here) / element_alignment * element_alignment;
    return whole > w->consumed ? whole - w->consumed : 0;
  };
  std::size_t bytes = piece();
  if (bytes < std::min<std::size_t>(w->in_header.length - w->consumed, min_read)) {
    fill_buffer(*w, buffered_read_bytes);
    bytes = piece();
  }
  if (bytes == 0 && w->read_closed && l.departed) fail_on_departed(l);
  return {w->in_header.signature, {w->read_buffer.data() + w->read_begin, bytes}};
}

void TcpTransport::advance(ChannelState& lane, DataSocket& w, std::size_t bytes) {
  w.consumed += bytes;
  lane.consumed += bytes;
  if (w.consumed < w.in_header.length) return;
  w.has_header = false;
  lane.front_socket = nullptr;
}

void TcpTransport::consume(int peer, Channel which, std::size_t bytes) {
  ChannelState& lane = peer_at(peer).channels[static_cast<std::size_t>(which)];
  if (bytes == 0) return;
  DataSocket* w = lane.front_socket;
  require(w && bytes <= w->read_end - w->read_begin && bytes <= w->in_header.length - w->consumed,
          Errc::invalid_argument, "consume(", bytes, ") of more than peek() showed from rank ", peer);
  w->read_begin += bytes;
  lane.peeked = true;
  advance(lane, *w, bytes);
}

/// Copies the buffered bytes first, then reads directly into `into`. A read that completes a frame also reads
/// the start of the next one into the buffer.
std::size_t TcpTransport::receive(int peer, Channel which, std::span<std::byte> into) {
  Peer& l = peer_at(peer);
  ChannelState& lane = l.channels[static_cast<std::size_t>(which)];
  into = into.first(std::min(into.size(), max_receive_bytes));
  std::size_t done = 0;
  CallSignature signature;
  lane.peeked = false;
  while (done < into.size()) {
    DataSocket* w = front_socket(l, lane);
    if (!w || (done && w->in_header.signature != signature)) break;
    signature = w->in_header.signature;
    const std::size_t rest = w->in_header.length - w->consumed;
    std::size_t n = std::min({rest, into.size() - done, w->read_end - w->read_begin});
    if (n) {
      std::memcpy(into.data() + done, w->read_buffer.data() + w->read_begin, n);
      w->read_begin += n;
    } else {
      if (w->read_closed && l.departed) fail_on_departed(l);
      if (w->read_closed || !w->fd_events.readable()) break;
      const std::size_t requested = std::min(rest, into.size() - done);
      if (w->read_buffer.empty()) w->read_buffer.resize(read_buffer_bytes);
      w->read_begin = w->read_end = 0;
      const iovec parts[2] = {{into.data() + done, requested}, {w->read_buffer.data(), first_read_bytes}};
      const std::size_t got = read_into(*w, {parts, requested == rest ? 2u : 1u});
      if (w->read_closed && l.departed) fail_on_departed(l);
      if (got == 0) break;
      n = std::min(requested, got);
      w->read_end = got - n;
    }
    advance(lane, *w, n);
    done += n;
  }
  return done;
}

// ---- failing ----

void TcpTransport::fail_on_departed(const Peer& l) {
  if (!local_failure_)
    local_failure_ = Failure{l.rank, Errc::peer_lost,
                             concat("rank ", l.rank, " left the group, and rank ", rank_, " still needs it")};
}

void TcpTransport::read_control(Peer& l, std::optional<Failure>& failure) {
  l.fd_events.events = 0;
  for (;;) {
    const ssize_t n = ::recv(l.control.get(), l.control_buffer.data() + l.buffered,
                             l.control_buffer.size() - l.buffered, MSG_DONTWAIT);
    if (n < 0 && would_block()) return;
    if (n <= 0) {
      l.control_closed = true;
      return;
    }
    l.buffered += static_cast<std::size_t>(n);
    if (l.buffered < l.control_buffer.size()) continue;
    l.buffered = 0;
    ControlFrame frame;
    std::memcpy(&frame, l.control_buffer.data(), sizeof frame);
    if (frame.magic != tcp::control_magic) {
      l.control_closed = true;
      return;
    }
    if (frame.kind == ControlFrame::departure) l.departed = true;
    if (frame.kind == ControlFrame::wait_query) wait_graph_.receive(l.rank, {WaitMessage::query, {}});
    if (frame.kind == ControlFrame::wait_reply) {
      WaitMessage note{WaitMessage::reply, {}};
      std::memcpy(&note.waits_for, frame.reason, sizeof note.waits_for);
      wait_graph_.receive(l.rank, note);
    }
    if (frame.kind == ControlFrame::failure && !failure)
      failure = Failure{frame.culprit, static_cast<Errc>(frame.code),
                        std::string(frame.reason, strnlen(frame.reason, sizeof frame.reason))};
  }
}

/// A failure if the peer has gone without a departure notice.
std::optional<Failure> TcpTransport::check_lost(Peer& l) {
  if (l.departed) return std::nullopt;
  bool ended = false;
  for (auto& lane : l.channels)
    for (auto& w : lane.data_sockets)
      ended |= w.read_closed || w.write_closed || (w.fd_events.events & (EPOLLHUP | EPOLLERR));
  if (ended && !l.departure_deadline) l.departure_deadline = Deadline::after(departure_grace);
  if (!l.control_closed && !(l.departure_deadline && l.departure_deadline->expired())) return std::nullopt;
  return Failure{l.rank, Errc::peer_lost,
                 concat("rank ", l.rank, " is lost: its connection to rank ", rank_,
                        " ended without a goodbye; its process or host died, or the network failed")};
}

/// Failure reports take precedence over lost connections: a peer that exits after a failure has reported it
/// before.
std::optional<Failure> TcpTransport::poll_failures() {
  std::optional<Failure> failure;
  flush_controls();
  for (auto& l : peers_) {
    if (l->fd_events.events && !l->control_closed) read_control(*l, failure);
    for (auto& lane : l->channels)
      for (auto& w : lane.data_sockets)
        if (w.busy) flush(w);
  }
  for (auto& l : peers_)
    if (!failure) failure = check_lost(*l);
  return failure ? failure : local_failure_;
}

void TcpTransport::send_control(Peer& l, const ControlFrame& frame, bool last_word) noexcept {
  const std::lock_guard lock(l.send_mutex);
  flush_control(l);
  const std::size_t before = l.unsent_bytes;
  if (before && !(last_word && before < sizeof frame)) return;
  std::memcpy(l.unsent_control.data() + before, &frame, sizeof frame);
  l.unsent_bytes = before + sizeof frame;
  flush_control(l);
  // No byte of the frame was sent: drop it unless it is a last word.
  if (!before && !last_word && l.unsent_bytes == sizeof frame) l.unsent_bytes = 0;
}

void TcpTransport::flush_controls() noexcept {
  for (auto& l : peers_) {
    if (!l->unsent_bytes) continue;
    const std::lock_guard lock(l->send_mutex);
    flush_control(*l);
  }
}

/// Requires send_mutex.
void TcpTransport::flush_control(Peer& l) noexcept {
  const std::size_t bytes = l.unsent_bytes;
  if (!bytes) return;
  const ssize_t n = ::send(l.control.get(), l.unsent_control.data(), bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (n <= 0) return;
  std::memmove(l.unsent_control.data(), l.unsent_control.data() + n, bytes - static_cast<std::size_t>(n));
  l.unsent_bytes = bytes - static_cast<std::size_t>(n);
}

void TcpTransport::broadcast_failure(const Failure& failure) noexcept {
  ControlFrame frame;
  frame.kind = ControlFrame::failure;
  frame.culprit = failure.culprit;
  frame.code = static_cast<std::uint32_t>(failure.code);
  failure.reason.copy(frame.reason, sizeof frame.reason - 1);
  for (auto& l : peers_) send_control(*l, frame, true);
}

void TcpTransport::send_wait_message(int peer, const WaitMessage& note) {
  ControlFrame frame;
  frame.kind = note.kind == WaitMessage::query ? ControlFrame::wait_query : ControlFrame::wait_reply;
  std::memcpy(frame.reason, &note.waits_for, sizeof note.waits_for);
  send_control(peer_at(peer), frame, false);
}

// ---- where to listen ----

namespace {

/// Whether `numbers` is the address or a prefix of it that ends at a separator: "10.0.0.1", "10.0" and
/// "10.0." match 10.0.0.1; "10.0.0.1" also matches 10.0.0.1%eth0.
bool has_address_prefix(const std::string& address, const std::string& numbers) {
  if (address.rfind(numbers, 0) != 0) return false;
  const auto separates = [](char c) { return c == '.' || c == ':' || c == '%'; };
  return address.size() == numbers.size() || separates(numbers.back()) || separates(address[numbers.size()]);
}

}  // namespace

SocketAddress choose_address(const std::string& interface, bool one_machine,
                             const std::string& way_to_store) {
  const auto all = interfaces();
  const auto loopback = [](const Interface& i) { return i.address.loopback(); };
  auto chosen = all.end();
  if (!interface.empty()) {
    chosen = std::find_if(all.begin(), all.end(), [&](const Interface& i) {
      return i.name == interface || has_address_prefix(i.address.host(), interface);
    });
    std::string list;
    for (const auto& i : all) list += concat(list.empty() ? "" : ", ", i.name, " (", i.address.host(), ")");
    require(
        chosen != all.end(), Errc::config, "RZ_INTERFACE='", interface,
        "' is neither the name nor the address, or its first numbers, of an interface that is up; there are ",
        list);
    require(one_machine || !loopback(*chosen), Errc::config, "RZ_INTERFACE='", interface,
            "' is loopback, but the group spans several machines; there are ", list);
  } else if (one_machine) {
    chosen = std::find_if(all.begin(), all.end(), loopback);
  } else {
    chosen = std::find_if(all.begin(), all.end(), [&](const Interface& i) {
      return !loopback(i) && i.address.host() == way_to_store;
    });
    if (chosen == all.end()) chosen = std::find_if_not(all.begin(), all.end(), loopback);
  }
  require(chosen != all.end(), Errc::rendezvous, "no network interface that ", one_machine ? "is" : "is not",
          " loopback is up on this host; RZ_INTERFACE chooses one");
  SocketAddress address = chosen->address;
  address.set_port(0);
  return address;
}

}  // namespace rz
