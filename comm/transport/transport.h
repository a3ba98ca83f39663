#pragma once
/// The interface for bytes between two ranks. A transport moves ordered byte streams, one per peer, channel
/// and direction. Only wait() blocks. One thread at a time drives a transport; functions that other threads
/// may call say so.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "comm/core/error.h"
#include "comm/os/cma.h"
#include "comm/transport/call_signature.h"
#include "comm/transport/wait_for_graph.h"

namespace rz {

/// Collectives and point-to-point messages have separate streams, so that neither blocks the other.
enum class Channel : std::uint8_t { collective, point_to_point };
inline constexpr int channel_count = 2;

/// The cause of a group's failure. The first failure wins, and every rank throws it.
struct Failure {
  int culprit = -1;             ///< rank, or -1 if none is at fault
  Errc code = Errc::peer_lost;  ///< peer_lost, aborted, timeout or mismatch
  std::string reason;
};

/// Received bytes, readable in place until consume().
struct ReceiveView {
  CallSignature signature;
  std::span<const std::byte> bytes;  ///< empty: nothing has arrived
};

class SharedMemoryAllocator;
struct MailboxView;
struct SharedMemoryHandle;

class Transport {
 public:
  virtual ~Transport() = default;

  /// Posts bytes to the stream to `peer`. Returns how many were accepted, from the front; 0 is normal (no
  /// space). Accepted bytes may be read from the caller's memory until released() has passed them. Never
  /// blocks.
  virtual std::size_t post(int peer, Channel, const CallSignature&, std::span<const std::byte>) = 0;
  /// Of all bytes ever accepted for this peer and channel, the number whose memory the caller may reuse.
  virtual std::uint64_t released(int peer, Channel) = 0;

  /// Returns a contiguous piece of the stream from `peer`, with one signature. It may be shorter than what
  /// has arrived. Until some of it is consumed, the next call returns at least the same bytes, possibly at
  /// another address.
  virtual ReceiveView peek(int peer, Channel) = 0;
  /// Removes the first `bytes` bytes that peek() returned. Errc::invalid_argument if it returned fewer.
  virtual void consume(int peer, Channel, std::size_t bytes) = 0;
  /// Copies bytes of the stream to `into` and returns how many. All have the signature that peek() would
  /// return. The default copies from peek(); a transport that can receive directly overrides it.
  virtual std::size_t receive(int peer, Channel, std::span<std::byte> into);

  /// Progresses transfers and detects failures. Once the group has failed, throws its Failure as an Error.
  virtual void progress() = 0;
  /// Sleeps until something may have changed, at most `most`. Spurious returns are normal. `eager`: the
  /// thread may spin before it sleeps.
  virtual void wait(std::chrono::microseconds most, bool eager = true) = 0;
  /// Makes wait() return. Any thread.
  virtual void wake() noexcept = 0;

  /// Fails the group: progress() throws on every rank within bounded time. Idempotent; does not block. Any
  /// thread.
  virtual void abort(const Failure&) noexcept = 0;

  /// Clears earlier replies and queries every peer for the ranks that it waits for. Queries and replies of
  /// peers arrive during progress().
  virtual void query_waits() = 0;
  /// Replies to all peers that have queried: this rank waits for `waits_for`.
  virtual void reply_waits(const RankSet& waits_for) = 0;
  /// The queries and replies received so far.
  virtual const WaitForGraph& wait_graph() const = 0;

  /// Returns zeroed memory, freed with the last copy of the pointer. Peers on this host can read and write it
  /// in place; without such peers it is private memory. Errc::system if there is not enough.
  virtual std::shared_ptr<std::byte> allocate(std::size_t bytes) = 0;
  /// The allocator behind allocate(); null if no peer shares memory. It may outlive the transport.
  virtual std::shared_ptr<SharedMemoryAllocator> allocator() const { return nullptr; }

  /// The mailboxes of all ranks, in rank order, if all share memory; else empty (comm/transport/mailbox.h).
  virtual std::span<const MailboxView> mailboxes() const { return {}; }
  /// Wakes peers that sleep. Call after a change to this rank's mailbox, and after a full fence where
  /// MailboxView::needs_full_fence is set.
  virtual void wake_peers() {}
  /// This rank waits for a change to the peer's mailbox: fails the group if the peer has departed.
  virtual void require_alive(int /*peer*/) {}
  /// True if this host has more ranks than processors, so that spinning keeps other ranks from running. Equal
  /// on all ranks that share memory; they derive chunk sizes from it.
  virtual bool oversubscribed() const { return false; }
  /// The handle of shared memory, valid on every peer of this host. Empty if the memory is neither from
  /// allocate() nor registered, or if its descriptor cannot be sent to a peer now.
  virtual std::optional<SharedMemoryHandle> export_handle(std::span<const std::byte>);
  /// Address of a peer's shared memory in this process, readable and writable. Null if the peer has not
  /// exported all of it.
  virtual std::byte* map_handle(int peer, const SharedMemoryHandle&, std::size_t bytes);
  /// Whether this rank may read the private memory of every other rank on its host (comm/os/cma.h).
  virtual bool has_cma() const { return false; }
  /// Fills `into` from this address of the peer's process. After the kernel has refused a read, has_cma() is
  /// false. Errc::system if the peer has no such memory.
  virtual CmaResult cma_read(int peer, std::uint64_t address, std::span<std::byte> into);

  /// True if all ranks share memory.
  virtual bool one_host() const = 0;
  /// The host number of every rank. Ranks with equal numbers share memory. Hosts are numbered from 0 in the
  /// order of their lowest ranks; equal on all ranks.
  virtual std::span<const int> hosts() const = 0;
  /// "shm", "tcp", "shm+tcp", for reports.
  virtual std::string describe() const = 0;
};

}  // namespace rz
