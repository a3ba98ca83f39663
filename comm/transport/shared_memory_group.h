#pragma once
/// The ranks of one node that share memory: what is possible only among them. The intra-node engine works on
/// this class instead of byte streams.

#include <array>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "comm/net/handshake.h"
#include "comm/os/cma.h"
#include "comm/shared_memory/allocator.h"
#include "comm/transport/failure_election.h"
#include "comm/transport/link_monitor.h"
#include "comm/transport/mailbox.h"
#include "comm/transport/segment_socket.h"
#include "comm/transport/shm_layout.h"

namespace rz {

/// A peer on this node.
struct ShmPeer {
  int rank;
  pid_t pid;
  SharedMemory memory;  ///< the peer's (shm_layout.h)
  UniqueFd doorbell;
  SegmentSocket socket;
  bool departed = false;
  const Mailbox* mailbox = nullptr;
  std::uint64_t mailbox_seen = 0;  ///< state of its mailbox, as last read by changed()

  shm::Header* header() const { return reinterpret_cast<shm::Header*>(memory.data()); }
  void wake_if_sleeping() const {
    auto& asleep = header()->sleeping;
    if (asleep.load(std::memory_order_seq_cst) && asleep.exchange(0))
      net::Poller::ring_doorbell(doorbell.get());
  }
};

/// One thread at a time, the one that drives the transport.
class SharedMemoryGroup {
 public:
  /// `ranks`: those of this node, this one included, ascending; at least two. `ring_bytes`: size of this
  /// rank's staging ring. All ranks use the smallest of their sizes, since the caches that they detect may
  /// differ. `one_node`: the group has no other ranks. `memory`: of the group that this one was split from;
  /// null for a new allocator.
  SharedMemoryGroup(LinkMonitor&, std::vector<int> ranks, std::size_t ring_bytes, bool one_node,
                    std::shared_ptr<SharedMemoryAllocator> memory = nullptr);

  /// The mailboxes of all ranks, in rank order; empty if some ranks of the transport's group are on other
  /// nodes (comm/transport/mailbox.h).
  std::span<const MailboxView> mailboxes() const {
    return one_node_ ? std::span(mailboxes_) : std::span<const MailboxView>();
  }
  /// Wakes peers that sleep. Call after a change to this rank's mailbox, and after a full fence where
  /// MailboxView::needs_full_fence is set.
  void wake_peers();
  /// This rank waits for a change to the peer's mailbox: fails the group if the peer has departed.
  void require_alive(int peer) {
    if (peer_at(peer).departed) monitor_.report_departed(peer);
  }
  /// The handle of shared memory, valid on every peer of this node. Empty if the memory is neither from the
  /// allocator nor registered, or if its descriptor cannot be sent to a peer now.
  std::optional<SharedMemoryHandle> export_handle(std::span<const std::byte>);
  /// Address of a peer's shared memory in this process, readable and writable. Null if the peer has not
  /// exported all of it.
  std::byte* map_handle(int peer, const SharedMemoryHandle&, std::size_t bytes);
  /// Whether this rank may read the private memory of every other rank on its node (comm/os/cma.h).
  bool has_cma() const { return has_cma_; }
  /// Fills `into` from this address of the peer's process. After the kernel has refused a read, has_cma() is
  /// false. Errc::system if the peer has no such memory.
  CmaResult cma_read(int peer, std::uint64_t address, std::span<std::byte> into);
  /// Allocates memory that peers map. It may outlive the transport.
  const std::shared_ptr<SharedMemoryAllocator>& allocator() const { return allocator_; }

  // For ShmTransport.

  /// Heartbeat of this rank. Any thread.
  void beat() noexcept { header()->beats.fetch_add(1, std::memory_order_relaxed); }

  /// This rank's descriptors for its peers: memory and doorbell.
  std::vector<int> passed_fds();
  /// Adds the peers, one connection each.
  void attach(std::vector<net::Connection>);

  ShmPeer& peer_at(int peer) { return *by_rank_[static_cast<std::size_t>(peer)]; }
  std::span<const std::unique_ptr<ShmPeer>> peers() const { return peers_; }
  shm::ChannelMemory incoming(const ShmPeer&, int channel) const;
  shm::ChannelMemory outgoing(const ShmPeer&, int channel) const;
  /// The segment that contains the bytes, if the peer has its descriptor; else null.
  std::shared_ptr<Segment> sent_segment(ShmPeer&, std::span<const std::byte>);
  /// True if a peer has changed its mailbox since the last call.
  bool changed();
  /// While it is set, peers ring the doorbell.
  void set_sleeping(bool);
  /// Handles messages of peers, and sends releases of segments. Returns a failure if a peer died.
  std::optional<Failure> poll();
  FailureElection& election() { return election_; }
  const FailureElection& election() const { return election_; }
  /// Peers that see this rank's socket close take it for a departure.
  void depart();

 private:
  /// The last segments whose descriptors all peers have; the next call mostly uses the same ones.
  struct Exported {
    struct Range {
      const std::byte *begin = nullptr, *end = nullptr;
      std::uint32_t number = 0;
      SharedMemoryHandle handle(const std::byte* at) const {
        return {number, static_cast<std::uint64_t>(at - begin)};
      }
    };
    std::array<Range, 2> ranges{};
    std::uint64_t version = 0;  // of the segment map
  };

  shm::Header* header() const { return reinterpret_cast<shm::Header*>(memory_.data()); }
  std::size_t index_of(int rank) const;
  void attach(net::Connection);
  bool probe_cma(const ShmPeer&) const;
  void release_segments();

  LinkMonitor& monitor_;
  const std::vector<int> ranks_;
  const bool one_node_;
  SharedMemory memory_;  // this rank's
  const std::shared_ptr<SharedMemoryAllocator> allocator_;
  const std::shared_ptr<ReleasedSegments> released_;
  SegmentMap segment_map_;
  Exported exported_;
  std::vector<std::unique_ptr<ShmPeer>> peers_;
  std::vector<ShmPeer*> by_rank_;  // null: on another node
  std::vector<MailboxView> mailboxes_;
  FailureElection election_;
  bool has_cma_ = true;
  bool asymmetric_fence_ = false;  // a rank fences heavily before it sleeps, so publishers need no fence
};

}  // namespace rz
