#pragma once
/// The interface for bytes between two ranks. A transport moves ordered byte streams, one per peer, channel
/// and direction. Only wait() blocks. One thread at a time drives a transport; functions that other threads
/// may call are marked "Any thread".

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "comm/transport/call_signature.h"
#include "comm/transport/failure.h"
#include "comm/transport/wait_for_graph.h"

namespace rz {

/// Received bytes, readable in place until consume().
struct ReceiveView {
  CallSignature signature;
  std::span<const std::byte> bytes;  ///< empty: nothing has arrived
};

class SharedMemoryGroup;

/// For Transport::progress(): a failure is thrown at once.
inline constexpr std::uint32_t all_calls = 0xffffffff;

class Transport {
 public:
  virtual ~Transport() = default;

  /// Posts bytes to the stream to `peer`. Returns how many were accepted, from the front; 0 is normal (no
  /// space). Accepted bytes may be read from the caller's memory until released() has passed them. Never
  /// blocks.
  virtual std::size_t post(int peer, Channel, const CallSignature&, std::span<const std::byte>) = 0;
  /// How many of all bytes ever accepted for this peer and channel have memory that the caller may reuse.
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

  /// Progresses transfers and detects failures. Once the group has failed, throws its Failure as an Error;
  /// one with Errc::cancelled once this rank has completed the calls that every other rank which cancels has.
  /// `completed`: collectives that this rank has.
  virtual void progress(std::uint32_t completed) = 0;
  /// Sleeps until something may have changed, at most `timeout`. Spurious returns are normal. `eager`: the
  /// thread may spin before it sleeps.
  virtual void wait(std::chrono::microseconds timeout, bool eager = true) = 0;
  /// Makes wait() return. Any thread.
  virtual void wake() noexcept = 0;

  /// For a thread that waits for several transports at once. Returns a descriptor that is readable once
  /// something may have changed or after wake(); end_sleep() must follow. Returns -1 if something may have
  /// changed already. The default waits for up to 1 ms and returns -1.
  virtual int begin_sleep();
  /// Ends begin_sleep() >= 0. In between only wake() and abort() are called.
  virtual void end_sleep() {}

  /// Fails the group: progress() throws on every rank within bounded time. The first failure counts; of all
  /// that are Errc::cancelled the fewest `calls`. Does not block. Any thread.
  virtual void abort(const Failure&) noexcept = 0;
  /// Once the group has failed: a peer that has been lost since, without a goodbye.
  virtual std::optional<Failure> find_lost() { return std::nullopt; }

  /// Clears earlier replies and queries every peer for the ranks that it waits for, and for its collective of
  /// the number that record_call() had last. Queries and replies of peers arrive during progress().
  virtual void query_waits() = 0;
  /// Likewise queries the `peers` ranks after this one (rank 0 follows the last) for their collective of this
  /// number, and keeps earlier replies.
  virtual void query_calls(std::uint32_t number, int peers) = 0;
  /// Sends this reply to all peers that have queried, with this rank's collective of the number of the query.
  virtual void reply_waits(const WaitMessage& reply) = 0;
  /// This rank begins the collective.
  virtual void record_call(const CallSignature&) = 0;
  /// The queries and replies received so far, and the last of the recorded calls.
  virtual const WaitForGraph& wait_graph() const = 0;

  /// For groups that are split from this one; null: none.
  virtual std::shared_ptr<class LinkMonitor> link_monitor() const { return nullptr; }
  /// No function is called any more, except by groups that were split from this one.
  virtual void close() noexcept {}

  /// What is possible only among ranks that share memory. Null if this rank shares none.
  virtual SharedMemoryGroup* shared_memory() { return nullptr; }
  /// The node number of every rank. Ranks with equal numbers share memory. Nodes are numbered from 0 in the
  /// order of their lowest ranks; equal on all ranks.
  virtual std::span<const int> nodes() const = 0;
  /// True if this node has more ranks than processors, so that spinning keeps other ranks from running. Equal
  /// on all ranks that share memory; they derive chunk sizes from it.
  virtual bool oversubscribed() const { return false; }
  /// "shm", "tcp", "shm+tcp", for reports.
  virtual std::string describe() const = 0;

  /// True if all ranks are on one node.
  bool one_node() const;
  /// Returns zeroed memory, freed with the last copy of the pointer. Peers on this node can read and write it
  /// in place; without such peers it is private memory. Errc::system if there is not enough.
  std::shared_ptr<std::byte> allocate(std::size_t bytes);
};

}  // namespace rz
