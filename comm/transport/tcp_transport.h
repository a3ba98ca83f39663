#pragma once
/// The links between ranks of different hosts, over TCP: the tcp part of the transport that
/// connect_transport() makes.
///
/// A link is one socket for control, one for the point_to_point lane and some for the collective lane, so
/// that no lane waits for another and bad news never waits for data. A lane's stream travels in frames: a
/// header of fixed size with the frame's place in the stream, then the bytes, written from the caller's
/// memory and, with receive(), read into it. Long posts are dealt out to the lane's sockets in blocks; all
/// else takes the first socket. What is not read stays in the kernel's buffers, and then at the sender.

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
constexpr std::size_t max_frame_bytes = 64 << 10;    ///< longest frame

struct FrameHeader {
  std::uint32_t magic = frame_magic;
  std::uint32_t length = 0;
  std::uint64_t offset = 0;  ///< of the frame's first byte in its stream
  CallSignature signature;
};
static_assert(sizeof(FrameHeader) == 40 && sizeof(CallSignature) == 24);

struct ControlFrame {
  enum Kind : std::uint32_t { departure = 1, failure = 2, wait_query = 3, wait_reply = 4 };
  std::uint32_t magic = control_magic;
  std::uint32_t kind = departure;
  std::int32_t culprit = -1;
  std::uint32_t code = 0;
  char reason[496] = {};  ///< or an answer's RankSet
};
static_assert(sizeof(ControlFrame) == 512 && sizeof(RankSet) <= sizeof(ControlFrame::reason));

/// One data socket.
struct DataSocket {
  UniqueFd socket;
  FdEvents fd_events;
  // Sending: the frame that the kernel has not taken whole yet.
  FrameHeader out_header;
  const std::byte* payload = nullptr;
  std::size_t sent = 0;  ///< of header and payload together
  bool busy = false;
  // Receiving: the front frame's header, once it is whole, and bytes behind it that were read already.
  std::vector<std::byte> read_buffer;
  std::size_t read_begin = 0, read_end = 0;
  FrameHeader in_header;
  bool has_header = false;
  std::size_t consumed = 0;   ///< bytes of the frame that were consumed
  bool read_closed = false;   ///< no byte will come any more
  bool write_closed = false;  ///< no byte can be sent any more
};

}  // namespace tcp

class TcpTransport {
 public:
  /// Listens on `bind_to` unless there are no peers. Raises the soft limit of open files as far as needed;
  /// Errc::system if the hard one is too low.
  TcpTransport(int rank, std::vector<int> peers, int sockets, std::string congestion,
               const SocketAddress& bind_to, Poller&, WaitForGraph&);
  /// Says goodbye; what the kernel has taken still arrives. In a child of fork() it only closes what it
  /// holds.
  ~TcpTransport();

  const std::string& address() const { return address_; }
  bool empty() const { return peer_ranks_.empty(); }
  /// addresses[r] is rank r's address().
  void connect(const HandshakeInfo&, const std::vector<std::string>& addresses, Deadline);

  std::size_t post(int peer, Channel, const CallSignature&, std::span<const std::byte>);
  std::uint64_t released(int peer, Channel);
  ReceiveView peek(int peer, Channel);
  void consume(int peer, Channel, std::size_t bytes);
  std::size_t receive(int peer, Channel, std::span<std::byte> into);

  /// Writes what waits to be written and reads the control sockets that the poller has flagged. Returns a
  /// failure that a peer reports, or that a peer is lost, or that this rank wants something of one that left.
  std::optional<Failure> poll_failures();
  /// Tells every peer. Any thread; waits for nothing.
  void broadcast_failure(const Failure&) noexcept;
  /// Sends what had no room when it was announced; look() does it, too.
  void flush_controls() noexcept;
  /// Lost if the peer reads nothing for long. What peers tell, look() passes on.
  void send_wait_message(int peer, const WaitMessage&);

 private:
  struct ChannelState {
    std::vector<tcp::DataSocket> data_sockets;
    std::size_t next_socket = 0;  ///< wire for the next block
    std::uint64_t accepted = 0, consumed = 0;
    tcp::DataSocket* front_socket = nullptr;  ///< whose frame continues the stream, once found
    bool peeked = false;  ///< what came last was read where it lay: the next is likely to be, too
  };
  struct Peer {
    int rank = -1;
    UniqueFd control;
    std::mutex send_mutex;  ///< announce() is for any thread
    std::array<std::byte, 2 * sizeof(tcp::ControlFrame)>
        unsent_control;                        ///< the rest of a frame, then a last word
    std::atomic<std::size_t> unsent_bytes{0};  ///< written under the mutex
    FdEvents fd_events;
    std::array<std::byte, sizeof(tcp::ControlFrame)>
        control_buffer;  ///< of a control frame that is not whole yet
    std::size_t buffered = 0;
    bool departed = false;  ///< said goodbye
    bool control_closed = false;
    std::optional<Deadline>
        departure_deadline;  ///< a data socket ended without a goodbye: one may still be under way
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
  /// What finds no room is lost, but for a last word (a failure, a goodbye) behind the rest of another frame.
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
  std::vector<Peer*> by_rank_;  ///< null: not over TCP
  std::optional<Failure> local_failure_;
};

/// The address to listen on. `interface`: a name, an address, or its first numbers; empty: loopback if the
/// whole group is on one machine, else the local address of the way to rank 0's store, else the first that is
/// not loopback. Errc::config lists what there is.
SocketAddress choose_address(const std::string& interface, bool one_machine, const std::string& way_to_store);

}  // namespace rz
