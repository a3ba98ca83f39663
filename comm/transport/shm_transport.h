#pragma once
/// The links between ranks of one host, through shared memory: the shm part of the transport that
/// connect_transport() makes.
///
/// Every rank owns a memfd that holds the channels *to* it, one a peer and lane: a ring of frames, one cache
/// line each, and a ring of bytes. One rank writes a channel, one reads it; there is no lock. A frame's bytes
/// lie in the frame itself (tiny ones), in the ring of bytes (a copy), or in the sender's own segment
/// (by reference: memory from allocate(), nothing copied). A unix socket a pair carries the segments'
/// descriptors; it breaks when a process dies.

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

class ShmTransport {
 public:
  /// `ranks`: those of this host, this one among them, ascending. `ring_bytes`: of this rank's meeting place;
  /// all ranks use as much of theirs as the smallest has, since the caches that they see may differ.
  ShmTransport(int rank, std::vector<int> ranks, std::size_t ring_bytes, Poller&, WaitForGraph&);
  /// Says goodbye: what was posted stays readable, what was promised by reference too. In a child of fork()
  /// it only closes what it holds.
  ~ShmTransport();

  /// Where this rank listens: a name in the abstract namespace that nobody can guess.
  const std::string& address() const { return address_; }
  /// addresses[r] is rank r's address(); `introduction` without passed_fds.
  void connect(HandshakeInfo, const std::vector<std::string>& addresses, Deadline);

  bool has(int peer) const { return by_rank_[static_cast<std::size_t>(peer)] != nullptr; }
  std::size_t post(int peer, Channel, const CallSignature&, std::span<const std::byte>);
  std::uint64_t released(int peer, Channel);
  ReceiveView peek(int peer, Channel);
  void consume(int peer, Channel, std::size_t bytes);
  const std::shared_ptr<SharedMemoryAllocator>& allocator() const { return allocator_; }

  /// Of the ranks of this host, in their order.
  std::span<const MailboxView> mailboxes() const { return mailboxes_; }
  void wake_peers();
  void require_alive(int peer) {
    if (peer_at(peer).departed) fail_on_departed(peer_at(peer));
  }
  std::optional<SharedMemoryHandle> export_handle(std::span<const std::byte>);
  std::byte* map_handle(int peer, const SharedMemoryHandle&, std::size_t bytes);
  bool has_cma() const { return has_cma_; }
  CmaResult cma_read(int peer, std::uint64_t address, std::span<std::byte> into);

  /// Has a peer posted or consumed anything since the last call that said so?
  bool changed();
  /// While asleep, peers ring the poller's doorbell when they post or consume.
  void set_sleeping(bool);

  /// Reads the sockets that the poller has flagged and sends what is due on them. Returns a failure if a peer
  /// died, or if this rank wants something from one that left.
  std::optional<Failure> poll_failures();
  /// What the ranks of this host have agreed on as the group's first failure.
  std::optional<Failure> group_failure() const;
  /// Proposes the first failure and returns the one that won; wakes every rank of the host. Once, any thread.
  Failure elect_failure(const Failure&);
  /// Lost if the peer reads nothing for long. What peers tell, look() passes on.
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
    std::uint64_t seen = 0;                        ///< bytes consumed, as changed() saw them
    std::deque<Reference> references;              ///< not yet consumed
  };
  struct Inbound {
    shm::Frame* frames = nullptr;
    shm::ChannelCounters* counters = nullptr;
    const std::byte* ring = nullptr;
    std::uint64_t frame_count = 0, ring_bytes = 0;
    std::uint64_t next = 0;  ///< frame
    std::uint64_t seen = 0;  ///< frames, as changed() saw them
    std::uint64_t consumed = 0, ring_done = 0;
    const std::byte* at = nullptr;  ///< the rest of the front frame, if it was looked at
    std::size_t remaining = 0;
  };
  struct Peer {
    int rank = -1;
    UniqueFd socket, doorbell;
    FdEvents fd_events;
    SharedMemory memory;  ///< the peer's
    shm::Header* header = nullptr;
    std::array<Outbound, channel_count> out;
    std::array<Inbound, channel_count> in;
    std::unordered_set<std::uint32_t> sent_segments;                  ///< my segments that it knows
    std::unordered_map<std::uint32_t, SharedMemory> mapped_segments;  ///< its segments that I have mapped
    std::vector<std::uint32_t> segments_to_release;                   ///< my segments that it should forget
    pid_t pid = 0;
    bool departed = false;
    std::size_t mailbox_index = 0;   ///< in meeting_
    std::uint64_t mailbox_seen = 0;  ///< what changed() saw there
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
  // The segments that all were told of last: mostly the next call's too.
  struct ExportedSegment {
    const std::byte *begin = nullptr, *end = nullptr;
    std::uint32_t number = 0;
    SharedMemoryHandle handle(const std::byte* at) const {
      return {number, static_cast<std::uint64_t>(at - begin)};
    }
  };
  std::array<ExportedSegment, 2> exported_{};
  std::uint64_t exported_version_ = 0;  // of map_
  SharedMemory memory_;
  shm::Header* header_ = nullptr;
  shm::Header* leader_ = nullptr;  ///< of the lowest rank of the host: its word decides who failed first
  std::vector<std::unique_ptr<Peer>> peers_;
  std::vector<Peer*> by_rank_;  ///< null: not of this host
  std::vector<MailboxView> mailboxes_;
  bool has_cma_ = false;
  bool asymmetric_fence_ = false;  ///< who goes to sleep fences for those who publish
  std::optional<Failure> local_failure_;
};

}  // namespace rz
