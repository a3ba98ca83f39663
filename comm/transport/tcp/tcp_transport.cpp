#include "comm/transport/tcp/tcp_transport.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "comm/core/error.h"
#include "comm/os/fd.h"
#include "comm/transport/failure.h"

namespace rz {

namespace {

/// Time for a departure notice to arrive after a data socket has ended.
constexpr auto departure_grace = std::chrono::milliseconds(500);

/// Nothing of the other end has arrived any more, not even its end.
bool is_silence(int error_number) {
  return error_number == ETIMEDOUT || error_number == EHOSTUNREACH || error_number == ENETUNREACH ||
         error_number == ENETDOWN || error_number == EHOSTDOWN;
}

constexpr int first_data_socket = 1;  // index 0: control, 1: point_to_point, from 2 on: collective

}  // namespace

net::SocketAddress choose_address(const std::string& interface, bool one_machine,
                                  const std::string& way_to_store) {
  const auto all = net::interfaces();
  const auto loopback = [](const net::Interface& i) { return i.address.loopback(); };
  auto chosen = all.end();
  if (!interface.empty()) {
    chosen =
        std::find_if(all.begin(), all.end(), [&](const net::Interface& i) { return i.has_name(interface); });
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
    chosen = std::find_if(all.begin(), all.end(), [&](const net::Interface& i) {
      return !loopback(i) && i.address.host() == way_to_store;
    });
    if (chosen == all.end()) chosen = std::find_if_not(all.begin(), all.end(), loopback);
  }
  require(chosen != all.end(), Errc::rendezvous, "no network interface that ", one_machine ? "is" : "is not",
          " loopback is up on this node; RZ_INTERFACE chooses one");
  net::SocketAddress address = chosen->address;
  address.set_port(0);
  return address;
}

TcpTransport::TcpTransport(std::shared_ptr<LinkMonitor> group_monitor, std::vector<int> peers,
                           TcpOptions options)
    : MonitoredTransport(std::move(group_monitor)),
      peer_ranks_(std::move(peers)),
      options_(std::move(options)) {
  if (peer_ranks_.empty()) return;
  monitor().add(*this, peer_ranks_, LinkData::sockets);
  require_open_files(files_for(peer_ranks_.size(), options_.sockets),
                     concat("rank ", monitor().rank(), ": TCP to ", peer_ranks_.size(), " ranks"),
                     ", or lower RZ_SOCKETS");
  listener_ = net::listen_tcp(options_.listen_address);
  net::set_congestion_control(listener_.get(), options_.congestion);
  address_ = net::local_address(listener_.get()).text();
}

void TcpTransport::connect(const net::HandshakeInfo& me, const std::vector<std::string>& addresses,
                           Deadline deadline) {
  by_rank_.resize(addresses.size());
  if (peer_ranks_.empty()) return;
  const int sockets = options_.sockets + 2;
  std::vector<net::Connection> calls;
  std::vector<int> callers;
  for (const int peer : peer_ranks_) {
    peers_.push_back(std::make_unique<Peer>(peer, options_.sockets, monitor()));
    by_rank_[static_cast<std::size_t>(peer)] = peers_.back().get();
    if (peer > me.rank) callers.push_back(peer);
    if (peer > me.rank) continue;
    const auto& address = addresses[static_cast<std::size_t>(peer)];
    const net::SocketAddress at = net::resolve(net::parse_host_port(address)).front();
    for (int i = 0; i < sockets; ++i)
      calls.push_back({peer, i, net::start_connect(at, options_.congestion), {}, address});
  }
  for (auto& c : net::handshake(me, listener_.get(), std::move(calls), callers, sockets, deadline))
    attach(std::move(c));
  listener_.close();
  choose_neighbours();
}

void TcpTransport::attach(net::Connection c) {
  net::set_tcp_options(c.socket.get());
  net::Stream stream(std::move(c.socket), std::move(c.tls));
  if (c.index < first_data_socket)
    return peer_at(c.rank).control.open(std::move(stream), monitor().poller(), options_.max_silence);
  const bool p2p = c.index == first_data_socket;
  channel_at(c.rank, p2p ? Channel::point_to_point : Channel::collective)
      .open(p2p ? 0 : c.index - first_data_socket - 1, std::move(stream));
}

TcpTransport::~TcpTransport() {
  if (!creator_.is_this_process()) return;  // the parent still uses the sockets and the epoll instance
  for (auto& peer : peers_) {
    peer->control.close(monitor().poller());
    for (auto& channel : peer->channels) channel.close();
  }
}

// ---- streams ----

std::size_t TcpTransport::post(int peer, Channel channel, const CallSignature& signature,
                               std::span<const std::byte> bytes) {
  if (peer_at(peer).control.departed()) return monitor().report_departed(peer), 0;
  return channel_at(peer, channel).post(signature, bytes);
}

std::uint64_t TcpTransport::released(int peer, Channel channel) {
  return channel_at(peer, channel).released();
}

ReceiveView TcpTransport::peek(int peer, Channel which) {
  tcp::TcpChannel& channel = channel_at(peer, which);
  const ReceiveView view = channel.peek();
  if (view.bytes.empty()) report_end(peer, channel);
  return view;
}

void TcpTransport::consume(int peer, Channel channel, std::size_t bytes) {
  channel_at(peer, channel).consume(bytes);
}

std::size_t TcpTransport::receive(int peer, Channel which, std::span<std::byte> into) {
  tcp::TcpChannel& channel = channel_at(peer, which);
  const std::size_t done = channel.receive(into);
  if (done == 0 && !into.empty()) report_end(peer, channel);
  return done;
}

/// This rank has found no more bytes of the peer, and needs some.
void TcpTransport::report_end(int peer, const tcp::TcpChannel& channel) {
  if (peer_at(peer).control.departed() && channel.at_end()) monitor().report_departed(peer);
}

// ---- failures ----

std::string TcpTransport::name_of(int rank) const {
  const auto r = static_cast<std::size_t>(rank);
  return concat("rank ", rank, r < options_.hosts.size() ? " on host " + options_.hosts[r] : "");
}

/// A failure if the peer has gone without a departure notice. Where it is silent, as the other end may say of
/// this one, no rank is blamed.
std::optional<Failure> TcpTransport::check_lost(Peer& peer) {
  if (peer.control.departed()) return std::nullopt;
  const bool ended = std::any_of(peer.channels.begin(), peer.channels.end(),
                                 [](const auto& channel) { return channel.ended(); });
  if (ended && !peer.departure_deadline) peer.departure_deadline = Deadline::after(departure_grace);
  if (!peer.control.closed() && !(peer.departure_deadline && peer.departure_deadline->expired()))
    return std::nullopt;
  std::string error = peer.control.error();
  int number = peer.control.error_number();
  for (const auto& channel : peer.channels) {
    if (error.empty()) error = channel.error();
    if (!number) number = channel.error_number();
  }
  if (is_silence(number)) return lost_link_to(peer.rank, std::strerror(number));
  if (!error.empty())
    return Failure{peer.rank, Errc::peer_lost,
                   concat("rank ", peer.rank, " is lost: its encrypted connection to rank ", monitor().rank(),
                          " failed: ", error)};
  return Failure{peer.rank, Errc::peer_lost,
                 concat("rank ", peer.rank, " is lost: its connection to rank ", monitor().rank(),
                        " ended without a goodbye; its process or host died, or the network failed")};
}

Failure TcpTransport::lost_link_to(int peer, const std::string& how) const {
  return {-1, Errc::peer_lost,
          concat(lost_link, name_of(monitor().rank()), " and ", name_of(peer), " is lost (", how,
                 "): a host or the network between failed, or only large packets do not pass (MTU); `doctor "
                 "--hostfile FILE` tries them")};
}

/// Failure reports take precedence over lost connections: a peer that exits after a failure has reported it
/// before.
std::optional<Failure> TcpTransport::poll_failures() {
  std::optional<Failure> failure;
  if (beats_from_) read_at_.store(std::chrono::steady_clock::now(), std::memory_order_relaxed);
  for (auto& peer : peers_) {
    peer->control.flush();
    if (auto reported = peer->control.read(peer->rank, monitor().wait_graph()); reported && !failure)
      failure = std::move(reported);
    for (auto& channel : peer->channels) channel.flush();
  }
  for (auto& peer : peers_)
    if (!failure) failure = check_lost(*peer);
  return failure;
}

Failure TcpTransport::spread_failure(const Failure& failure) {
  for (auto& peer : peers_) peer->control.send_failure(failure);
  return failure;
}

std::optional<std::uint32_t> TcpTransport::cancelled_after() const {
  std::optional<std::uint32_t> fewest;
  for (const auto& peer : peers_)
    if (const auto calls = peer->control.cancelled_after(); calls && calls < fewest.value_or(~0u))
      fewest = calls;
  return fewest;
}

void TcpTransport::flush_failure() noexcept {
  for (auto& peer : peers_) peer->control.flush();
}

// ---- heartbeats ----

void TcpTransport::choose_neighbours() {
  const auto nodes = monitor().nodes();
  const int count = 1 + *std::max_element(nodes.begin(), nodes.end());
  const auto first_of = [&](int node) {
    return static_cast<int>(std::find(nodes.begin(), nodes.end(), node) - nodes.begin());
  };
  const int own = nodes[static_cast<std::size_t>(monitor().rank())];
  if (count == 1 || first_of(own) != monitor().rank()) return;
  beats_to_ = &peer_at(first_of((own + 1) % count));
  beats_from_ = &peer_at(first_of((own + count - 1) % count));
}

void TcpTransport::beat() noexcept {
  if (beats_to_) beats_to_->control.send_beat();
}

void TcpTransport::add_pulses(std::vector<Pulse>& pulses) const {
  if (!beats_from_ || beats_from_->control.departed()) return;
  const auto read_at = read_at_.load(std::memory_order_relaxed);
  if (read_at != std::chrono::steady_clock::time_point{})
    pulses.push_back({beats_from_->rank, beats_from_->control.beats(), read_at, 0});
}

std::optional<Failure> TcpTransport::judge_silence(const Pulse& pulse,
                                                   std::chrono::duration<double> silence) const {
  const std::string time = rounded(silence.count(), 2) + " s";
  if (pulse.link) return lost_link_to(pulse.rank, concat("nothing was acknowledged for ", time));
  return Failure{pulse.rank, Errc::peer_lost,
                 concat(name_of(pulse.rank), " has shown no sign of life for ", time,
                        ": its process was stopped, or its host or the network to it has failed")};
}

void TcpTransport::add_unacknowledged(std::vector<Unacknowledged>& sockets) const {
  for (const auto& peer : peers_)
    for (const tcp::TcpChannel& channel : peer->channels)
      for (const tcp::DataSocket& s : channel.sockets())
        if (const auto silence = net::unacknowledged(s.descriptor()))
          sockets.push_back({peer->rank, s.descriptor(), *silence});
}

void TcpTransport::send_wait_message(int peer, const WaitMessage& message) {
  peer_at(peer).control.send_wait_message(message);
}

}  // namespace rz
