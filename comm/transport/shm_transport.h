#pragma once
/// Shared-memory transport between the ranks of one host: the intra-node part of connect_transport().
///
/// Every rank owns a memfd that holds its incoming channels, one per peer and Channel, and its mailbox with
/// the staging ring. A channel is a ring of cache-line frames and a ring of bytes. It has one writer and one
/// reader, and no lock. A frame's bytes lie in the frame itself (up to 24), in the ring of bytes (copied), or
/// in a segment of the sender (by reference, zero-copy: memory from allocate(), or registered). A unix socket
/// per pair of ranks carries the segments' descriptors. It hangs up when the peer's process dies.

#include <array>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "comm/core/deadline.h"
#include "comm/net/handshake.h"
#include "comm/net/poller.h"
#include "comm/shared_memory/allocator.h"
#include "comm/shared_memory/shared_memory.h"
#include "comm/transport/mailbox.h"
#include "comm/transport/transport.h"

namespace rz {

namespace shm {
struct Header;
struct Frame;
struct ChannelCounters;
}  // namespace shm

/// Functions without a comment implement those of Transport for the peers of this host.
class ShmTransport {
 public:
  /// `ranks`: the ranks of this host, this one included, ascending. `ring_bytes`: size of this rank's staging
  /// ring. All ranks use the smallest of their sizes, since the caches that they detect may differ.
  ShmTransport(int rank, std::vector<int> ranks, std::size_t ring_bytes, Poller&, WaitForGraph&);
  /// Departs in order: posted data stays readable, data posted by reference included. In a child of fork() it
  /// only closes descriptors.
  ~ShmTransport();

  /// Where this rank listens: an unguessable name in the abstract unix namespace.
  const std::string& address() const { return address_; }
  /// Connects with the other ranks of the host. addresses[r] is rank r's address(); passed_fds is ignored.
  void connect(HandshakeInfo, const std::vector<std::string>& addresses, Deadline);

  bool has(int peer) const { return by_rank_[static_cast<std::size_t>(peer)] != nullptr; }
  std::size_t post(int peer, Channel, const CallSignature&, std::span<const std::byte>);
  std::uint64_t released(int peer, Channel);
  ReceiveView peek(int peer, Channel);
  void consume(int peer, Channel, std::size_t bytes);
  const std::shared_ptr<SharedMemoryAllocator>& allocator() const { return allocator_; }

  /// The mailboxes of the ranks of this host, in rank order.
  std::span<const MailboxView> mailboxes() const { return mailboxes_; }
  void wake_peers();
  void require_alive(int peer) {
    if (peer_at(peer).departed) fail_on_departed(peer_at(peer));
  }
  std::optional<SharedMemoryHandle> export_handle(std::span<const std::byte>);
  std::byte* map_handle(int peer, const SharedMemoryHandle&, std::size_t bytes);
  bool has_cma() const { return has_cma_; }
  CmaResult cma_read(int peer, std::uint64_t address, std::span<std::byte> into);

  /// True if a peer has posted, consumed, or updated its mailbox since the last call.
  bool changed();
  /// While it is set, peers ring the poller's doorbell after they post, consume, or update their mailbox.
  void set_sleeping(bool);

  /// Handles messages on the sockets that the poller has flagged, and sends pending releases of segments.
  /// Returns a failure if a peer died, or if this rank still needs a departed peer.
  std::optional<Failure> poll_failures();
  /// The group's first failure, as elected by the ranks of this host; empty if there is none.
  std::optional<Failure> group_failure() const;
  /// Proposes a failure as the group's first and returns the elected one. Wakes every rank of the host. Call
  /// at most once; any thread.
  Failure elect_failure(const Failure&);
  /// Sends a wait-for message; drops it if the peer's socket is full. poll_failures() receives those of
  /// peers.
  void send_wait_message(int peer, const WaitMessage&);

 private:
  struct Reference {
    std::uint64_t begin, end;  ///< positions in the stream
    std::shared_ptr<Segment> segment;
  };
  struct Outbound {
    shm::Frame* frames = nullptr;
    shm::ChannelCounters* counters = nullptr;
    std::byte* ring = nullptr;
    std::uint64_t frame_count = 0, ring_bytes = 0;
    std::uint64_t posted = 0, ring_posted = 0, accepted = 0;
    std::uint64_t frames_done = 0, ring_done = 0;  ///< as last read from the counters
    std::uint64_t seen = 0;                        ///< bytes consumed, as last read by changed()
    std::deque<Reference> references;              ///< not yet consumed
  };
  struct Inbound {
    shm::Frame* frames = nullptr;
    shm::ChannelCounters* counters = nullptr;
    const std::byte* ring = nullptr;
    std::uint64_t frame_count = 0, ring_bytes = 0;
    std::uint64_t next = 0;  ///< number of the front frame
    std::uint64_t seen = 0;  ///< frames that have arrived, as last read by changed()
    std::uint64_t consumed = 0, ring_done = 0;
    const std::byte* at = nullptr;  ///< the rest of the front frame; null before it is resolved
    std::size_t remaining = 0;
  };
  struct Peer {
    int rank = -1;
    UniqueFd socket, doorbell;
    FdEvents fd_events;
    SharedMemory memory;  ///< the peer's memfd
    shm::Header* header = nullptr;
    std::array<Outbound, channel_count> out;
    std::array<Inbound, channel_count> in;
    std::unordered_set<std::uint32_t> sent_segments;                  ///< own, whose descriptors it has
    std::unordered_map<std::uint32_t, SharedMemory> mapped_segments;  ///< the peer's, mapped here
    std::vector<std::uint32_t> segments_to_release;                   ///< own, that it must unmap
    pid_t pid = 0;
    bool departed = false;
    std::size_t mailbox_index = 0;   ///< in mailboxes_
    std::uint64_t mailbox_seen = 0;  ///< its state, as last read by changed()
  };

  Peer& peer_at(int peer) { return *by_rank_[static_cast<std::size_t>(peer)]; }
  void attach(Connection);
  bool probe_cma(const Peer&) const;
  std::size_t post_by_reference(Peer&, Outbound&, const CallSignature&, std::span<const std::byte>,
                                std::shared_ptr<Segment>);
  std::size_t post_copy(Outbound&, const CallSignature&, std::span<const std::byte>);
  bool send_segment(Peer&, const Segment&);
  const std::byte* resolve(Peer&, const Inbound&, const shm::Frame&);
  void read_messages(Peer&);
  void send_releases();
  void reap_references(Peer&, Outbound&);
  static void wake_if_sleeping(Peer&);
  void fail_on_departed(const Peer&);
  void protocol_error(const Peer&, const shm::Frame&);

  const Creator creator_;
  int rank_;
  std::vector<int> ranks_;
  Poller& poller_;
  WaitForGraph& wait_graph_;
  std::string address_;
  UniqueFd listener_;
  std::shared_ptr<SharedMemoryAllocator> allocator_ =
      std::make_shared<SharedMemoryAllocator>(static_cast<std::uint32_t>(rank_));
  SegmentMap segment_map_;
  // The last segments whose descriptors all peers have; the next call mostly uses the same ones.
  struct ExportedSegment {
    const std::byte *begin = nullptr, *end = nullptr;
    std::uint32_t number = 0;
    SharedMemoryHandle handle(const std::byte* at) const {
      return {number, static_cast<std::uint64_t>(at - begin)};
    }
  };
  std::array<ExportedSegment, 2> exported_{};
  std::uint64_t exported_version_ = 0;  // of segment_map_
  SharedMemory memory_;
  shm::Header* header_ = nullptr;
  shm::Header* leader_ = nullptr;  ///< of the host's lowest rank; it elects the first failure
  std::vector<std::unique_ptr<Peer>> peers_;
  std::vector<Peer*> by_rank_;  ///< null: on another host
  std::vector<MailboxView> mailboxes_;
  bool has_cma_ = false;
  bool asymmetric_fence_ = false;  ///< a rank fences heavily before it sleeps, so publishers need no fence
  std::optional<Failure> local_failure_;
};

}  // namespace rz
