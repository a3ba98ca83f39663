#include "comm/transports/tcp.h"

#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "comm/core/error.h"
#include "comm/transports/open_files.h"

namespace rz {

using tcp::ControlFrame;
using tcp::FrameHeader;
using tcp::Wire;

namespace {

/// First read of a frame: its header, and a small frame whole. Long frames go straight to their place after
/// it.
constexpr std::size_t glance = 4096;
/// Frames of up to so much are put together before they are sent.
constexpr std::size_t worth_copying = 2048;
constexpr std::size_t staging = 64 << 10;
constexpr std::size_t buffer_bytes = staging + glance;
/// A look at less than this reads on first, if there is more.
constexpr std::size_t worth_reading = 16 << 10;
/// Pieces of a frame that is not whole yet end at multiples of this, so that no element is cut.
constexpr std::size_t grain = 64;
/// receive() returns after so much, so that one fast peer does not keep the others waiting.
constexpr std::size_t most_in_one_receive = 1 << 20;
/// What the kernel takes of a socket beyond what is on the wire. Enough to keep the wire busy; with more,
/// blocks would wait in one socket's queue while another socket, whose later blocks wait for them, has long
/// sent its own.
constexpr int most_unsent = 256 << 10;
/// A host that has acknowledged nothing for so long has vanished.
constexpr auto longest_silence = std::chrono::seconds(10);
constexpr auto grace_for_goodbye = std::chrono::milliseconds(500);

constexpr int first_data_socket = 1;  // 0 is control, 1 point_to_point, 2 and up collective

bool would_block() { return errno == EAGAIN || errno == EWOULDBLOCK; }

}  // namespace

TcpLinks::TcpLinks(int rank, std::vector<int> peers, int sockets, std::string congestion,
                   const SocketAddress& bind_to, Poller& poller, WaitForGraph& waiting)
    : rank_(rank),
      peers_(std::move(peers)),
      sockets_(sockets),
      congestion_(std::move(congestion)),
      poller_(poller),
      waiting_(waiting) {
  if (peers_.empty()) return;
  require_open_files(peers_.size() * static_cast<std::size_t>(sockets_ + 2),
                     str("rank ", rank_, ": TCP to ", peers_.size(), " ranks"), ", or lower RZ_SOCKETS");
  listener_ = listen_tcp(bind_to);
  set_congestion_control(listener_.get(), congestion_);
  address_ = local_address(listener_.get()).text();
}

void TcpLinks::connect(const Introduction& me, const std::vector<std::string>& addresses, Deadline deadline) {
  by_rank_.resize(addresses.size());
  if (peers_.empty()) return;
  std::vector<Connection> calls;
  std::vector<int> callers;
  for (const int peer : peers_) {
    links_.push_back(std::make_unique<Link>());
    Link& l = *links_.back();
    l.rank = peer;
    l.lanes[static_cast<std::size_t>(Lane::collective)].wires =
        std::vector<Wire>(static_cast<std::size_t>(sockets_));
    l.lanes[static_cast<std::size_t>(Lane::point_to_point)].wires = std::vector<Wire>(1);
    by_rank_[static_cast<std::size_t>(peer)] = &l;
    if (peer > rank_) callers.push_back(peer);
    if (peer > rank_) continue;
    const auto& address = addresses[static_cast<std::size_t>(peer)];
    const SocketAddress at = resolve(parse_host_port(address)).front();
    for (int i = 0; i < sockets_ + 2; ++i)
      calls.push_back({peer, i, start_connect(at, congestion_), {}, address});
  }
  for (auto& c : meet(me, listener_.get(), std::move(calls), callers, sockets_ + 2, deadline))
    attach(std::move(c));
  listener_.close();
}

void TcpLinks::attach(Connection c) {
  Link& l = link(c.rank);
  set_tcp_options(c.socket.get());
  if (c.index < first_data_socket) {
    l.control = std::move(c.socket);
    limit_unacknowledged(l.control.get(), longest_silence);
    l.watched.events = EPOLLIN;  // what came before the registration
    return poller_.add(l.control.get(), l.watched, EPOLLIN);
  }
  const bool p2p = c.index == first_data_socket;
  auto& lane = l.lanes[static_cast<std::size_t>(p2p ? Lane::point_to_point : Lane::collective)];
  Wire& w = lane.wires[p2p ? 0 : static_cast<std::size_t>(c.index - first_data_socket - 1)];
  w.socket = std::move(c.socket);
  limit_unsent(w.socket.get(), most_unsent);
  w.watched.events = EPOLLIN | EPOLLOUT;
  poller_.add(w.socket.get(), w.watched, EPOLLIN | EPOLLOUT);
}

TcpLinks::~TcpLinks() {
  if (!creator_.here()) return;  // the sockets, and the epoll that watches them, are the parent's too
  ControlFrame goodbye;
  for (auto& l : links_) {
    if (l->control) send_control(*l, goodbye, true);
    const auto end = [&](Descriptor& socket) {
      if (!socket) return;
      poller_.remove(socket.get());
      shutdown(socket.get(), SHUT_WR);
      socket.close();
    };
    end(l->control);
    for (auto& lane : l->lanes)
      for (auto& w : lane.wires) end(w.socket);
  }
}

// ---- sending ----

/// A socket whose last frame has gone and that takes more. Long posts take the next in turn that does; short
/// ones the first socket, so that they do not overtake each other for nothing.
Wire* TcpLinks::free_wire(LaneState& lane, bool striped) {
  const std::size_t n = striped ? lane.wires.size() : 1;
  for (std::size_t i = 0; i < n; ++i) {
    Wire& w = lane.wires[striped ? (lane.next + i) % n : 0];
    if (w.busy) flush(w);
    if (w.busy || w.broken || !w.watched.writable()) continue;
    if (striped) lane.next = (lane.next + i + 1) % n;
    return &w;
  }
  return nullptr;
}

std::size_t TcpLinks::post(int peer, Lane which, const Signature& signature,
                           std::span<const std::byte> bytes) {
  Link& l = link(peer);
  if (l.left) return want(l), 0;
  LaneState& lane = l.lanes[static_cast<std::size_t>(which)];
  const bool striped = bytes.size() >= tcp::block;
  std::size_t taken = 0;
  while (taken < bytes.size()) {
    Wire* w = free_wire(lane, striped);
    if (!w) break;
    w->out.length = static_cast<std::uint32_t>(std::min(bytes.size() - taken, tcp::block));
    w->out.offset = lane.taken;
    w->out.signature = signature;
    w->payload = bytes.data() + taken;
    w->sent = 0;
    flush(*w);
    if (w->sent == 0 && w->busy) {  // the kernel took nothing: neither do we
      w->busy = false;
      continue;
    }
    taken += w->out.length;
    lane.taken += w->out.length;
  }
  return taken;
}

/// A small frame in one piece: for the system that is less work than two.
ssize_t TcpLinks::send_whole(const Wire& w) {
  std::array<std::byte, worth_copying> frame;
  std::memcpy(frame.data(), &w.out, sizeof(FrameHeader));
  std::memcpy(frame.data() + sizeof(FrameHeader), w.payload, w.out.length);
  return send(w.socket.get(), frame.data(), sizeof(FrameHeader) + w.out.length, MSG_NOSIGNAL | MSG_DONTWAIT);
}

ssize_t TcpLinks::send_rest(Wire& w) {
  iovec parts[2];
  int n = 0;
  if (w.sent < sizeof(FrameHeader))
    parts[n++] = {reinterpret_cast<char*>(&w.out) + w.sent, sizeof(FrameHeader) - w.sent};
  const std::size_t skip = w.sent > sizeof(FrameHeader) ? w.sent - sizeof(FrameHeader) : 0;
  parts[n++] = {const_cast<std::byte*>(w.payload) + skip, w.out.length - skip};
  msghdr message{};
  message.msg_iov = parts, message.msg_iovlen = static_cast<std::size_t>(n);
  return sendmsg(w.socket.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

/// Writes what is left of the frame; `busy` says whether something still is.
void TcpLinks::flush(Wire& w) {
  const std::size_t total = sizeof(FrameHeader) + w.out.length;
  w.busy = true;
  if (w.broken || !w.watched.writable()) return;
  const ssize_t sent = w.sent == 0 && total <= worth_copying ? send_whole(w) : send_rest(w);
  if (sent > 0) w.sent += static_cast<std::size_t>(sent);
  w.busy = w.sent < total;
  if (sent < 0 && !would_block() && errno != EINTR) w.broken = true;  // look() finds out why
  // Short: the kernel takes no more, and will say so when it does.
  if (w.busy && (sent >= 0 || would_block())) w.watched.events &= ~static_cast<std::uint32_t>(EPOLLOUT);
}

std::uint64_t TcpLinks::released(int peer, Lane which) {
  LaneState& lane = link(peer).lanes[static_cast<std::size_t>(which)];
  std::uint64_t released = lane.taken;
  for (const Wire& w : lane.wires)
    if (w.busy)
      released = std::min(released,
                          w.out.offset + (w.sent > sizeof(FrameHeader) ? w.sent - sizeof(FrameHeader) : 0));
  return released;
}

// ---- receiving ----

/// Appends what is there to the buffer, at most `most`.
void TcpLinks::fill(Wire& w, std::size_t most) {
  if (w.ended || !w.watched.readable()) return;
  if (w.buffer.empty()) w.buffer.resize(buffer_bytes);
  if (w.begin) {  // only ever a few bytes are left here
    std::memmove(w.buffer.data(), w.buffer.data() + w.begin, w.end - w.begin);
    w.end -= w.begin, w.begin = 0;
  }
  const iovec part{w.buffer.data() + w.end, std::min(most, w.buffer.size() - w.end)};
  w.end += read(w, {&part, 1});
}

/// One read; keeps the wire's flags.
std::size_t TcpLinks::read(Wire& w, std::span<const iovec> parts) {
  std::size_t asked = 0;
  for (const iovec& part : parts) asked += part.iov_len;
  const ssize_t n = parts.size() == 1
                        ? recv(w.socket.get(), parts[0].iov_base, parts[0].iov_len, MSG_DONTWAIT)
                        : readv(w.socket.get(), parts.data(), static_cast<int>(parts.size()));
  const bool nothing = n < 0 && would_block();
  if (n == 0 || (n < 0 && !nothing && errno != EINTR)) w.ended = true;
  // Short: the kernel has no more, and will say so when it has. Unless the end was announced: it is not said
  // twice.
  if (nothing || (n > 0 && static_cast<std::size_t>(n) < asked && !w.watched.hung_up()))
    w.watched.events &= ~static_cast<std::uint32_t>(EPOLLIN);
  return n > 0 ? static_cast<std::size_t>(n) : 0;
}

bool TcpLinks::read_header(Link& l, LaneState& lane, Wire& w) {
  if (w.has_header) return true;
  if (w.end - w.begin < sizeof(FrameHeader)) fill(w, lane.peeked ? staging : glance);
  if (w.end - w.begin < sizeof(FrameHeader)) return false;
  std::memcpy(&w.in, w.buffer.data() + w.begin, sizeof(FrameHeader));
  if (w.in.magic != tcp::frame_magic || w.in.length == 0 || w.in.length > tcp::block ||
      w.in.offset < lane.consumed) {
    damaged(l, w, lane);
    return false;
  }
  w.begin += sizeof(FrameHeader);
  w.has_header = true;
  w.done = 0;
  return true;
}

void TcpLinks::damaged(const Link& l, const Wire& w, const LaneState& lane) {
  if (!wanted_)
    wanted_ = Failure{l.rank, Errc::peer_lost,
                      str("rank ", l.rank, " sent a damaged frame: magic ", w.in.magic, ", length ",
                          w.in.length, ", offset ", w.in.offset, " where ", lane.consumed, " was due")};
}

/// The wire whose frame continues the stream. Each wire's frames are in order, so it is at one of the fronts.
Wire* TcpLinks::front(Link& l, LaneState& lane) {
  if (lane.front) return lane.front;
  bool open = false, whole = true;
  for (Wire& w : lane.wires) {
    if (read_header(l, lane, w) && w.in.offset == lane.consumed) return lane.front = &w;
    open |= !w.ended;
    whole &= w.has_header;
  }
  if (whole) damaged(l, lane.wires.front(), lane);  // every wire shows a frame of a later place
  if (!open && l.left) want(l);
  return nullptr;
}

Incoming TcpLinks::peek(int peer, Lane which) {
  Link& l = link(peer);
  LaneState& lane = l.lanes[static_cast<std::size_t>(which)];
  Wire* w = front(l, lane);
  if (!w) return {};
  const auto piece = [&] {
    const std::size_t rest = w->in.length - w->done, here = w->end - w->begin;
    if (here >= rest) return rest;
    const std::size_t whole = (w->done + here) / grain * grain;
    return whole > w->done ? whole - w->done : 0;
  };
  std::size_t bytes = piece();
  if (bytes < std::min<std::size_t>(w->in.length - w->done, worth_reading)) {
    fill(*w, staging);
    bytes = piece();
  }
  if (bytes == 0 && w->ended && l.left) want(l);
  return {w->in.signature, {w->buffer.data() + w->begin, bytes}};
}

void TcpLinks::advance(LaneState& lane, Wire& w, std::size_t bytes) {
  w.done += bytes;
  lane.consumed += bytes;
  if (w.done < w.in.length) return;
  w.has_header = false;
  lane.front = nullptr;
}

void TcpLinks::consume(int peer, Lane which, std::size_t bytes) {
  LaneState& lane = link(peer).lanes[static_cast<std::size_t>(which)];
  if (bytes == 0) return;
  Wire* w = lane.front;
  require(w && bytes <= w->end - w->begin && bytes <= w->in.length - w->done, Errc::invalid_argument,
          "consume(", bytes, ") of more than peek() showed from rank ", peer);
  w->begin += bytes;
  lane.peeked = true;
  advance(lane, *w, bytes);
}

/// First what lies in the buffer, then straight from the kernel into place; a read that ends a frame takes
/// the start of the next along.
std::size_t TcpLinks::receive(int peer, Lane which, std::span<std::byte> into) {
  Link& l = link(peer);
  LaneState& lane = l.lanes[static_cast<std::size_t>(which)];
  into = into.first(std::min(into.size(), most_in_one_receive));
  std::size_t done = 0;
  Signature signature;
  lane.peeked = false;
  while (done < into.size()) {
    Wire* w = front(l, lane);
    if (!w || (done && w->in.signature != signature)) break;
    signature = w->in.signature;
    const std::size_t rest = w->in.length - w->done;
    std::size_t n = std::min({rest, into.size() - done, w->end - w->begin});
    if (n) {
      std::memcpy(into.data() + done, w->buffer.data() + w->begin, n);
      w->begin += n;
    } else {
      if (w->ended && l.left) want(l);
      if (w->ended || !w->watched.readable()) break;
      const std::size_t asked = std::min(rest, into.size() - done);
      if (w->buffer.empty()) w->buffer.resize(buffer_bytes);
      w->begin = w->end = 0;
      const iovec parts[2] = {{into.data() + done, asked}, {w->buffer.data(), glance}};
      const std::size_t got = read(*w, {parts, asked == rest ? 2u : 1u});
      if (w->ended && l.left) want(l);
      if (got == 0) break;
      n = std::min(asked, got);
      w->end = got - n;
    }
    advance(lane, *w, n);
    done += n;
  }
  return done;
}

// ---- failing ----

void TcpLinks::want(const Link& l) {
  if (!wanted_)
    wanted_ = Failure{l.rank, Errc::peer_lost,
                      str("rank ", l.rank, " left the group, and rank ", rank_, " still needs it")};
}

void TcpLinks::read_control(Link& l, std::optional<Failure>& failure) {
  l.watched.events = 0;
  for (;;) {
    const ssize_t n = ::recv(l.control.get(), l.buffer.data() + l.got, l.buffer.size() - l.got, MSG_DONTWAIT);
    if (n < 0 && would_block()) return;
    if (n <= 0) {
      l.control_ended = true;
      return;
    }
    l.got += static_cast<std::size_t>(n);
    if (l.got < l.buffer.size()) continue;
    l.got = 0;
    ControlFrame frame;
    std::memcpy(&frame, l.buffer.data(), sizeof frame);
    if (frame.magic != tcp::control_magic) {
      l.control_ended = true;
      return;
    }
    if (frame.kind == ControlFrame::goodbye) l.left = true;
    if (frame.kind == ControlFrame::question) waiting_.hear(l.rank, {WaitNote::question, {}});
    if (frame.kind == ControlFrame::answer) {
      WaitNote note{WaitNote::answer, {}};
      std::memcpy(&note.waits_for, frame.reason, sizeof note.waits_for);
      waiting_.hear(l.rank, note);
    }
    if (frame.kind == ControlFrame::failure && !failure)
      failure = Failure{frame.culprit, static_cast<Errc>(frame.code),
                        std::string(frame.reason, strnlen(frame.reason, sizeof frame.reason))};
  }
}

/// Has this peer gone without a goodbye?
std::optional<Failure> TcpLinks::lost(Link& l) {
  if (l.left) return std::nullopt;
  bool ended = false;
  for (auto& lane : l.lanes)
    for (auto& w : lane.wires) ended |= w.ended || w.broken || (w.watched.events & (EPOLLHUP | EPOLLERR));
  if (ended && !l.grace) l.grace = Deadline::after(grace_for_goodbye);
  if (!l.control_ended && !(l.grace && l.grace->expired())) return std::nullopt;
  return Failure{l.rank, Errc::peer_lost,
                 str("rank ", l.rank, " is lost: its connection to rank ", rank_,
                     " ended without a goodbye; its process or host died, or the network failed")};
}

/// Reports come first: a peer that goes because of a failure tells it before.
std::optional<Failure> TcpLinks::look() {
  std::optional<Failure> failure;
  flush_controls();
  for (auto& l : links_) {
    if (l->watched.events && !l->control_ended) read_control(*l, failure);
    for (auto& lane : l->lanes)
      for (auto& w : lane.wires)
        if (w.busy) flush(w);
  }
  for (auto& l : links_)
    if (!failure) failure = lost(*l);
  return failure ? failure : wanted_;
}

void TcpLinks::send_control(Link& l, const ControlFrame& frame, bool last_word) noexcept {
  const std::lock_guard lock(l.sending);
  flush_control(l);
  const std::size_t before = l.unsent_bytes;
  if (before && !(last_word && before < sizeof frame)) return;
  std::memcpy(l.unsent.data() + before, &frame, sizeof frame);
  l.unsent_bytes = before + sizeof frame;
  flush_control(l);
  // Nothing of it has gone: unless it is a last word, nothing has to.
  if (!before && !last_word && l.unsent_bytes == sizeof frame) l.unsent_bytes = 0;
}

void TcpLinks::flush_controls() noexcept {
  for (auto& l : links_) {
    if (!l->unsent_bytes) continue;
    const std::lock_guard lock(l->sending);
    flush_control(*l);
  }
}

/// Under the mutex.
void TcpLinks::flush_control(Link& l) noexcept {
  const std::size_t bytes = l.unsent_bytes;
  if (!bytes) return;
  const ssize_t n = ::send(l.control.get(), l.unsent.data(), bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (n <= 0) return;
  std::memmove(l.unsent.data(), l.unsent.data() + n, bytes - static_cast<std::size_t>(n));
  l.unsent_bytes = bytes - static_cast<std::size_t>(n);
}

void TcpLinks::announce(const Failure& failure) noexcept {
  ControlFrame frame;
  frame.kind = ControlFrame::failure;
  frame.culprit = failure.culprit;
  frame.code = static_cast<std::uint32_t>(failure.code);
  failure.reason.copy(frame.reason, sizeof frame.reason - 1);
  for (auto& l : links_) send_control(*l, frame, true);
}

void TcpLinks::tell(int peer, const WaitNote& note) {
  ControlFrame frame;
  frame.kind = note.kind == WaitNote::question ? ControlFrame::question : ControlFrame::answer;
  std::memcpy(frame.reason, &note.waits_for, sizeof note.waits_for);
  send_control(link(peer), frame, false);
}

// ---- where to listen ----

namespace {

/// "10.0.0.1" is an address, or the beginning of 10.0.0.1%eth0; "10.0" and "10.0." are of 10.0.0.1.
bool begins_with_numbers(const std::string& address, const std::string& numbers) {
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
      return i.name == interface || begins_with_numbers(i.address.host(), interface);
    });
    std::string list;
    for (const auto& i : all) list += str(list.empty() ? "" : ", ", i.name, " (", i.address.host(), ")");
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
