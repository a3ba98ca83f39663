#pragma once
/// TCP transport, between ranks of different nodes.
///
/// Each pair of ranks has one control socket, one socket for Channel::point_to_point and several for
/// Channel::collective, so that no channel blocks the other and failure reports never wait for data. A
/// channel's stream is sent in frames: a header of fixed size with the frame's offset in the stream, then the
/// payload, sent from the caller's memory and, by receive(), read into it. Unread data stays in the kernel's
/// buffers, and then at the sender (TCP flow control).

#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/core/deadline.h"
#include "comm/net/handshake.h"
#include "comm/net/socket.h"
#include "comm/os/process.h"
#include "comm/transport/monitored_transport.h"
#include "comm/transport/tcp/control_socket.h"
#include "comm/transport/tcp/tcp_channel.h"

namespace rz {

/// The address to listen on, with port 0. `interface`: an interface's name, address, or leading numbers of
/// its address. If empty: loopback if the whole group is on one machine, else the interface with the address
/// `way_to_store` (local end of the route to rank 0's store), else the first one that is not loopback.
/// Errc::config, listing the interfaces, if `interface` matches none or is loopback in a group of several
/// machines. Errc::rendezvous if no interface is suitable.
net::SocketAddress choose_address(const std::string& interface, bool one_machine,
                                  const std::string& way_to_store);

/// Settings of the connections, equal on all ranks except the address.
struct TcpOptions {
  int sockets = 1;                                ///< per peer, for collectives
  std::string congestion = "system";              ///< set_congestion_control()
  net::SocketAddress listen_address;              ///< choose_address(); unused without peers
  std::vector<std::string> hosts = {};            ///< names of the ranks' hosts, for messages; may be empty
  std::chrono::milliseconds max_silence{10'000};  ///< of control sockets
};

/// Functions without a comment implement those of Transport for the peers, and those of MonitoredLinks.
class TcpTransport final : public MonitoredTransport, private MonitoredLinks {
 public:
  /// Listens if there are peers. Raises the soft limit of open files as needed; Errc::system if the hard
  /// limit is too low.
  TcpTransport(std::shared_ptr<LinkMonitor>, std::vector<int> peers, TcpOptions);
  /// Descriptors that a rank with this many peers on other nodes needs, with TcpOptions::sockets.
  static std::size_t files_for(std::size_t peers, int sockets) {
    return peers * static_cast<std::size_t>(sockets + 2);
  }
  /// Departs in order: notifies the peers; data that the kernel has accepted still arrives. In a child of
  /// fork() it only closes descriptors.
  ~TcpTransport();

  /// Empty without peers.
  std::string address() const override { return address_; }
  void connect(const net::HandshakeInfo&, const std::vector<std::string>& addresses, Deadline) override;

  std::size_t post(int peer, Channel, const CallSignature&, std::span<const std::byte>) override;
  std::uint64_t released(int peer, Channel) override;
  ReceiveView peek(int peer, Channel) override;
  void consume(int peer, Channel, std::size_t bytes) override;
  std::size_t receive(int peer, Channel, std::span<std::byte> into) override;

  std::string describe() const override { return "tcp"; }

 private:
  struct Peer {
    Peer(int r, int sockets, LinkMonitor& m) : rank(r), channels{{{r, sockets, m}, {r, 1, m}}} {}
    const int rank;
    tcp::ControlSocket control;
    std::array<tcp::TcpChannel, channel_count> channels;
    std::optional<Deadline> departure_deadline;  ///< for the departure notice, once a data socket has ended
  };

  std::optional<Failure> poll_failures() override;
  Failure spread_failure(const Failure&) override;
  std::optional<std::uint32_t> cancelled_after() const override;
  void beat() noexcept override;
  void add_pulses(std::vector<Pulse>&) const override;
  std::optional<Failure> judge_silence(const Pulse&, std::chrono::duration<double>) const override;
  void add_unacknowledged(std::vector<Unacknowledged>&) const override;
  void flush_failure() noexcept override;
  void send_wait_message(int peer, const WaitMessage&) override;

  void choose_neighbours();
  Failure lost_link_to(int peer, const std::string& how) const;
  Peer& peer_at(int peer) { return *by_rank_[static_cast<std::size_t>(peer)]; }
  tcp::TcpChannel& channel_at(int peer, Channel c) {
    return peer_at(peer).channels[static_cast<std::size_t>(c)];
  }
  void attach(net::Connection);
  void report_end(int peer, const tcp::TcpChannel&);
  std::optional<Failure> check_lost(Peer&);
  std::string name_of(int rank) const;

  const Creator creator_;
  const std::vector<int> peer_ranks_;
  const TcpOptions options_;
  UniqueFd listener_;
  std::string address_;
  std::vector<std::unique_ptr<Peer>> peers_;
  std::vector<Peer*> by_rank_;  // null: not connected by TCP
  // Heartbeats go round the nodes, from the first rank of each to that of the next; null on other ranks.
  Peer *beats_to_ = nullptr, *beats_from_ = nullptr;
  std::atomic<std::chrono::steady_clock::time_point> read_at_{};  // when control sockets were last read
};

}  // namespace rz
