#pragma once
/// The seam for bytes between two ranks. A transport moves ordered streams of bytes, one a peer, lane and
/// direction; it never blocks but in wait(), and it is driven by one thread at a time.

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

/// Collectives and point-to-point messages never wait for each other.
enum class Channel : std::uint8_t { collective, point_to_point };
inline constexpr int channel_count = 2;

/// Why a group can go no further. The first one wins and every rank learns it.
struct Failure {
  int culprit = -1;             ///< rank, or -1
  Errc code = Errc::peer_lost;  ///< what every rank throws: peer_lost, aborted, timeout or mismatch
  std::string reason;
};

/// Bytes that have arrived and can be read where they lie, until consume().
struct ReceiveView {
  CallSignature signature;
  std::span<const std::byte> bytes;  ///< empty: nothing there yet
};

class SharedMemoryAllocator;
struct MailboxView;
struct SharedMemoryHandle;

class Transport {
 public:
  virtual ~Transport() = default;

  /// Offers bytes to a peer's stream and returns how many were taken, from the front; 0 is normal. Bytes
  /// taken may still be read from the caller's memory until released() has passed them. Never waits.
  virtual std::size_t post(int peer, Channel, const CallSignature&, std::span<const std::byte>) = 0;
  /// How many bytes of all that were ever taken for this peer and lane need their memory no longer.
  virtual std::uint64_t released(int peer, Channel) = 0;

  /// A contiguous piece of the peer's stream, of one signature; may be shorter than what has arrived. Until
  /// some of it is consumed the next call shows the same bytes, and perhaps more and elsewhere.
  virtual ReceiveView peek(int peer, Channel) = 0;
  virtual void consume(int peer, Channel, std::size_t bytes) = 0;
  /// Takes bytes of the stream straight into place, and returns how many; all of them of the signature that
  /// peek() would show. A wire that would else copy twice overrides it.
  virtual std::size_t receive(int peer, Channel, std::span<std::byte> into);

  /// Moves what can be moved and looks for failures. Throws Error(peer_lost / aborted) once there is one.
  virtual void progress() = 0;
  /// Sleeps until something may have changed, at most `most`. Spurious returns are normal. `eager`: it may
  /// keep its processor busy for a while before, since its thread has nothing else to do.
  virtual void wait(std::chrono::microseconds most, bool eager = true) = 0;
  /// May be called from any thread while another waits or makes progress: makes wait() return.
  virtual void wake() noexcept = 0;

  /// Poisons the group: every rank's progress() throws within bounded time. Any thread; idempotent; never
  /// waits long.
  virtual void abort(const Failure&) noexcept = 0;

  /// Asks every peer whom it waits for, and forgets what they have told. Their questions and answers come
  /// with progress().
  virtual void query_waits() = 0;
  /// Tells it to all who have asked.
  virtual void reply_waits(const RankSet& waits_for) = 0;
  /// What they have asked and told.
  virtual const WaitForGraph& wait_graph() const = 0;

  /// Memory that peers of this host can read where it lies; elsewhere plain memory. Freed with the last copy.
  virtual std::shared_ptr<std::byte> allocate(std::size_t bytes) = 0;
  /// What that memory comes from, where peers share it; null: none does. It may outlive the transport.
  virtual std::shared_ptr<SharedMemoryAllocator> allocator() const { return nullptr; }

  /// Where the ranks meet (comm/transport/mailbox.h), one place a rank, if all share memory; else empty.
  virtual std::span<const MailboxView> mailboxes() const { return {}; }
  /// To be called after a change in this rank's place, and a fence: wakes peers that sleep.
  virtual void wake_peers() {}
  /// This rank waits for news of a peer in its place: a failure if the peer has left.
  virtual void require_alive(int /*peer*/) {}
  /// More ranks than processors on this host: who spins keeps others from running. The same on all ranks that
  /// share memory, which cut their calls by it.
  virtual bool oversubscribed() const { return false; }
  /// Memory from allocate() as every peer can find it. None: it is other memory, or a peer cannot be told
  /// now.
  virtual std::optional<SharedMemoryHandle> export_handle(std::span<const std::byte>);
  /// Where a peer's memory lies here, to read and write; null: the peer has not shared all of it.
  virtual std::byte* map_handle(int peer, const SharedMemoryHandle&, std::size_t bytes);
  /// Whether this rank may read the own memory of every other one (comm/os/cma.h).
  virtual bool has_cma() const { return false; }
  /// Fills `into` from what lies at that address of the peer's process. Once the kernel has refused it,
  /// has_cma() is false. Errc::system if the peer has no such memory.
  virtual CmaResult cma_read(int peer, std::uint64_t address, std::span<std::byte> into);

  /// True if every pair of ranks shares memory.
  virtual bool one_host() const = 0;
  /// The host of every rank: those of one number share memory. Numbered from 0 in the order of their first
  /// ranks; the same on all ranks.
  virtual std::span<const int> hosts() const = 0;
  /// "shm", "tcp", "shm+tcp", for reports.
  virtual std::string describe() const = 0;
};

}  // namespace rz
