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
#include "comm/core/process.h"
#include "comm/transports/meet.h"
#include "comm/transports/poller.h"
#include "comm/transports/socket.h"
#include "comm/transports/transport.h"

namespace rz {

namespace tcp {

constexpr std::uint32_t frame_magic = 0x32465a52;    // "RZF2": the version is part of it
constexpr std::uint32_t control_magic = 0x31435a52;  // "RZC1"
constexpr std::size_t block = 64 << 10;              ///< longest frame

struct FrameHeader {
  std::uint32_t magic = frame_magic;
  std::uint32_t length = 0;
  std::uint64_t offset = 0;  ///< of the frame's first byte in its stream
  Signature signature;
};
static_assert(sizeof(FrameHeader) == 40 && sizeof(Signature) == 24);

struct ControlFrame {
  enum Kind : std::uint32_t { goodbye = 1, failure = 2, question = 3, answer = 4 };
  std::uint32_t magic = control_magic;
  std::uint32_t kind = goodbye;
  std::int32_t culprit = -1;
  std::uint32_t code = 0;
  char reason[496] = {};  ///< or an answer's RankSet
};
static_assert(sizeof(ControlFrame) == 512 && sizeof(RankSet) <= sizeof(ControlFrame::reason));

/// One data socket.
struct Wire {
  Descriptor socket;
  Watched watched;
  // Sending: the frame that the kernel has not taken whole yet.
  FrameHeader out;
  const std::byte* payload = nullptr;
  std::size_t sent = 0;  ///< of header and payload together
  bool busy = false;
  // Receiving: the front frame's header, once it is whole, and bytes behind it that were read already.
  std::vector<std::byte> buffer;
  std::size_t begin = 0, end = 0;
  FrameHeader in;
  bool has_header = false;
  std::size_t done = 0;  ///< bytes of the frame that were consumed
  bool ended = false;    ///< no byte will come any more
  bool broken = false;   ///< no byte can be sent any more
};

}  // namespace tcp

class TcpLinks {
 public:
  /// Listens on `bind_to` unless there are no peers. Raises the soft limit of open files as far as needed;
  /// Errc::system if the hard one is too low.
  TcpLinks(int rank, std::vector<int> peers, int sockets, std::string congestion,
           const SocketAddress& bind_to, Poller&, WaitForGraph&);
  /// Says goodbye; what the kernel has taken still arrives. In a child of fork() it only closes what it
  /// holds.
  ~TcpLinks();

  const std::string& address() const { return address_; }
  bool empty() const { return peers_.empty(); }
  /// addresses[r] is rank r's address().
  void connect(const Introduction&, const std::vector<std::string>& addresses, Deadline);

  std::size_t post(int peer, Lane, const Signature&, std::span<const std::byte>);
  std::uint64_t released(int peer, Lane);
  Incoming peek(int peer, Lane);
  void consume(int peer, Lane, std::size_t bytes);
  std::size_t receive(int peer, Lane, std::span<std::byte> into);

  /// Writes what waits to be written and reads the control sockets that the poller has flagged. Returns a
  /// failure that a peer reports, or that a peer is lost, or that this rank wants something of one that left.
  std::optional<Failure> look();
  /// Tells every peer. Any thread; waits for nothing.
  void announce(const Failure&) noexcept;
  /// Sends what had no room when it was announced; look() does it, too.
  void flush_controls() noexcept;
  /// Lost if the peer reads nothing for long. What peers tell, look() passes on.
  void tell(int peer, const WaitNote&);

 private:
  struct LaneState {
    std::vector<tcp::Wire> wires;
    std::size_t next = 0;  ///< wire for the next block
    std::uint64_t taken = 0, consumed = 0;
    tcp::Wire* front = nullptr;  ///< whose frame continues the stream, once found
    bool peeked = false;         ///< what came last was read where it lay: the next is likely to be, too
  };
  struct Link {
    int rank = -1;
    Descriptor control;
    std::mutex sending;                                           ///< announce() is for any thread
    std::array<std::byte, 2 * sizeof(tcp::ControlFrame)> unsent;  ///< the rest of a frame, then a last word
    std::atomic<std::size_t> unsent_bytes{0};                     ///< written under the mutex
    Watched watched;
    std::array<std::byte, sizeof(tcp::ControlFrame)> buffer;  ///< of a control frame that is not whole yet
    std::size_t got = 0;
    bool left = false;  ///< said goodbye
    bool control_ended = false;
    std::optional<Deadline> grace;  ///< a data socket ended without a goodbye: one may still be under way
    std::array<LaneState, lane_count> lanes;
  };

  Link& link(int peer) { return *by_rank_[static_cast<std::size_t>(peer)]; }
  void attach(Connection);
  tcp::Wire* free_wire(LaneState&, bool striped);
  void flush(tcp::Wire&);
  static ssize_t send_whole(const tcp::Wire&);
  static ssize_t send_rest(tcp::Wire&);
  tcp::Wire* front(Link&, LaneState&);
  bool read_header(Link&, LaneState&, tcp::Wire&);
  void fill(tcp::Wire&, std::size_t most);
  static std::size_t read(tcp::Wire&, std::span<const iovec> parts);
  void damaged(const Link&, const tcp::Wire&, const LaneState&);
  void advance(LaneState&, tcp::Wire&, std::size_t bytes);
  /// What finds no room is lost, but for a last word (a failure, a goodbye) behind the rest of another frame.
  static void send_control(Link&, const tcp::ControlFrame&, bool last_word) noexcept;
  static void flush_control(Link&) noexcept;
  void read_control(Link&, std::optional<Failure>&);
  std::optional<Failure> lost(Link&);
  void want(const Link&);

  const Creator creator_;
  int rank_;
  std::vector<int> peers_;
  int sockets_;
  std::string congestion_;
  Poller& poller_;
  WaitForGraph& waiting_;
  Descriptor listener_;
  std::string address_;
  std::vector<std::unique_ptr<Link>> links_;
  std::vector<Link*> by_rank_;  ///< null: not over TCP
  std::optional<Failure> wanted_;
};

/// The address to listen on. `interface`: a name, an address, or its first numbers; empty: loopback if the
/// whole group is on one machine, else the local address of the way to rank 0's store, else the first that is
/// not loopback. Errc::config lists what there is.
SocketAddress choose_address(const std::string& interface, bool one_machine, const std::string& way_to_store);

}  // namespace rz
