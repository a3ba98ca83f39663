#pragma once
/// TCP transport between ranks of different hosts: the inter-node part of connect_transport().
///
/// Each pair of ranks has one control socket, one socket for Channel::point_to_point and several for
/// Channel::collective, so that no channel blocks the other and failure reports never wait for data. A
/// channel's stream is sent in frames: a header of fixed size with the frame's offset in the stream, then the
/// payload, sent from the caller's memory and, by receive(), read into it. Posts of at least max_frame_bytes
/// are striped over the channel's sockets, frame by frame; shorter posts use the first socket. Unread data
/// stays in the kernel's buffers, and then at the sender (TCP flow control).

#include <sys/uio.h>

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/core/deadline.h"
#include "comm/net/handshake.h"
#include "comm/net/poller.h"
#include "comm/net/socket.h"
#include "comm/os/process.h"
#include "comm/transport/transport.h"

namespace rz {

namespace tcp {

constexpr std::uint32_t frame_magic = 0x32465a52;    // "RZF2": the version is part of it
constexpr std::uint32_t control_magic = 0x31435a52;  // "RZC1"
constexpr std::size_t max_frame_bytes = 64 << 10;    ///< payload of a frame, at most

struct FrameHeader {
  std::uint32_t magic = frame_magic;
  std::uint32_t length = 0;
  std::uint64_t offset = 0;  ///< of the payload's first byte in the stream
  CallSignature signature;
};
static_assert(sizeof(FrameHeader) == 40 && sizeof(CallSignature) == 24);

struct ControlFrame {
  enum Kind : std::uint32_t { departure = 1, failure = 2, wait_query = 3, wait_reply = 4 };
  std::uint32_t magic = control_magic;
  std::uint32_t kind = departure;
  std::int32_t culprit = -1;
  std::uint32_t code = 0;
  char reason[496] = {};  ///< of a failure; a wait_reply has its RankSet here
};
static_assert(sizeof(ControlFrame) == 512 && sizeof(RankSet) <= sizeof(ControlFrame::reason));

/// One data socket.
struct DataSocket {
  UniqueFd socket;
  FdEvents fd_events;
  // Sending: the current frame, `busy` while the kernel has not accepted all of it.
  FrameHeader out_header;
  const std::byte* payload = nullptr;
  std::size_t sent = 0;  ///< bytes of header and payload
  bool busy = false;
  // Receiving: the header of the front frame once it is complete, and buffered bytes that follow it.
  std::vector<std::byte> read_buffer;
  std::size_t read_begin = 0, read_end = 0;
  FrameHeader in_header;
  bool has_header = false;
  std::size_t consumed = 0;   ///< bytes of the front frame's payload
  bool read_closed = false;   ///< end of stream, or an error
  bool write_closed = false;  ///< sending has failed
};

}  // namespace tcp

/// Functions without a comment implement those of Transport for the peers connected by TCP.
class TcpTransport {
 public:
  /// Listens on `bind_to` if there are peers. Raises the soft limit of open files as needed; Errc::system if
  /// the hard limit is too low.
  TcpTransport(int rank, std::vector<int> peers, int sockets, std::string congestion,
               const SocketAddress& bind_to, Poller&, WaitForGraph&);
  /// Departs in order: notifies the peers; data that the kernel has accepted still arrives. In a child of
  /// fork() it only closes descriptors.
  ~TcpTransport();

  const std::string& address() const { return address_; }
  bool empty() const { return peer_ranks_.empty(); }
  /// Connects with the peers. addresses[r] is rank r's address().
  void connect(const HandshakeInfo&, const std::vector<std::string>& addresses, Deadline);

  std::size_t post(int peer, Channel, const CallSignature&, std::span<const std::byte>);
  std::uint64_t released(int peer, Channel);
  ReceiveView peek(int peer, Channel);
  void consume(int peer, Channel, std::size_t bytes);
  std::size_t receive(int peer, Channel, std::span<std::byte> into);

  /// Continues pending sends and reads the control sockets that the poller has flagged. Returns a failure if
  /// a peer reports one, if a peer is lost, or if this rank still needs a departed peer.
  std::optional<Failure> poll_failures();
  /// Sends the failure to every peer. Never blocks. Any thread.
  void broadcast_failure(const Failure&) noexcept;
  /// Continues sending queued control frames. poll_failures() does so, too.
  void flush_controls() noexcept;
  /// Sends a wait-for message; drops it if the control socket is full. poll_failures() receives those of
  /// peers.
  void send_wait_message(int peer, const WaitMessage&);

 private:
  struct ChannelState {
    std::vector<tcp::DataSocket> data_sockets;
    std::size_t next_socket = 0;  ///< for the next block
    std::uint64_t accepted = 0, consumed = 0;
    tcp::DataSocket* front_socket = nullptr;  ///< its front frame continues the stream; null: not found
    bool peeked = false;  ///< the last bytes were consumed from the buffer: read more into it ahead
  };
  struct Peer {
    int rank = -1;
    UniqueFd control;
    std::mutex send_mutex;  ///< broadcast_failure() runs on any thread
    std::array<std::byte, 2 * sizeof(tcp::ControlFrame)>
        unsent_control;                        ///< the rest of a frame, then at most one last word
    std::atomic<std::size_t> unsent_bytes{0};  ///< written under send_mutex
    FdEvents fd_events;
    std::array<std::byte, sizeof(tcp::ControlFrame)>
        control_buffer;  ///< the received part of a control frame
    std::size_t buffered = 0;
    bool departed = false;  ///< it has sent a departure notice
    bool control_closed = false;
    std::optional<Deadline> departure_deadline;  ///< for the departure notice, once a data socket has ended
    std::array<ChannelState, channel_count> channels;
  };

  Peer& peer_at(int peer) { return *by_rank_[static_cast<std::size_t>(peer)]; }
  void attach(Connection);
  tcp::DataSocket* free_data_socket(ChannelState&, bool striped);
  void flush(tcp::DataSocket&);
  static ssize_t send_small_frame(const tcp::DataSocket&);
  static ssize_t send_remaining(tcp::DataSocket&);
  tcp::DataSocket* front_socket(Peer&, ChannelState&);
  bool read_header(Peer&, ChannelState&, tcp::DataSocket&);
  void fill_buffer(tcp::DataSocket&, std::size_t most);
  static std::size_t read_into(tcp::DataSocket&, std::span<const iovec> parts);
  void protocol_error(const Peer&, const tcp::DataSocket&, const ChannelState&);
  void advance(ChannelState&, tcp::DataSocket&, std::size_t bytes);
  /// Drops the frame if the socket is full. Only a last word (failure or departure) is queued, behind the
  /// rest of at most one other frame.
  static void send_control(Peer&, const tcp::ControlFrame&, bool last_word) noexcept;
  static void flush_control(Peer&) noexcept;
  void read_control(Peer&, std::optional<Failure>&);
  std::optional<Failure> check_lost(Peer&);
  void fail_on_departed(const Peer&);

  const Creator creator_;
  int rank_;
  std::vector<int> peer_ranks_;
  int sockets_;
  std::string congestion_control_;
  Poller& poller_;
  WaitForGraph& wait_graph_;
  UniqueFd listener_;
  std::string address_;
  std::vector<std::unique_ptr<Peer>> peers_;
  std::vector<Peer*> by_rank_;  ///< null: not connected by TCP
  std::optional<Failure> local_failure_;
};

/// The address to listen on, with port 0. `interface`: an interface's name, address, or leading numbers of
/// its address. If empty: loopback if the whole group is on one machine, else the interface with the address
/// `way_to_store` (local end of the route to rank 0's store), else the first one that is not loopback.
/// Errc::config, listing the interfaces, if `interface` matches none or is loopback in a group of several
/// machines. Errc::rendezvous if no interface is suitable.
SocketAddress choose_address(const std::string& interface, bool one_machine, const std::string& way_to_store);

}  // namespace rz
