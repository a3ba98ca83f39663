#pragma once
/// Interface of a collective backend: native (comm/backends/native), MPI, NCCL and peer_cuda implement it.

#include <chrono>
#include <memory>
#include <span>
#include <string>

#include "collective.h"
#include "core/error.h"
#include "registration.h"
#include "work.h"

namespace rz {

class SharedMemoryAllocator;

class Backend {
 public:
  virtual ~Backend() = default;
  /// Called in a child of fork() in place of the destructor. Closes the child's copies of descriptors and
  /// mappings. Must not use threads or locks, nor signal a departure to the peers.
  virtual void abandon() noexcept {}
  /// Starts the calls of a group and returns one Work that ends when all of them have ended. The calls may
  /// run concurrently and in any order. The caller has validated the arguments. Thread-safe: calls from
  /// several threads are serialized.
  virtual Work submit(std::span<const CollectiveCall> group) = 0;
  /// Ends every operation in flight on all ranks with Errc::aborted. Any thread; idempotent; returns in
  /// bounded time.
  virtual void abort(const std::string& reason) noexcept = 0;
  /// Ends every operation in flight on all ranks with this error, which is Errc::cancelled, unless the group
  /// has failed: first those that a rank which calls it has completed end on the others, too. Returns once no
  /// operation of this rank uses memory of the caller. Throws Errc::peer_lost if that was the failure.
  /// Unless overridden it aborts the group, and the operations end with Errc::aborted.
  virtual void cancel(const Error& cause) { abort(cause.what()); }
  /// After cancel(): throws Errc::peer_lost if a peer has ended without a goodbye since.
  virtual void check_peers() {}
  /// Throws the group's failure if this rank has already detected one. Never blocks. Used while the caller
  /// waits for peers by other means than Work::wait().
  virtual void check() {}
  /// Tracks all work that is in `stream` now, for Communicator::synchronize(): runs of a CUDA graph have no
  /// Work. The state's wait() throws the group's failure. After `limit` it throws Errc::timeout and names the
  /// missing ranks. Returns null if the backend cannot track a stream; the caller then polls check().
  virtual std::shared_ptr<WorkState> watch_stream(const Stream&, std::chrono::milliseconds /*limit*/) {
    return nullptr;
  }
  /// Collective over `members` only (ranks of this group, in the order of the new group; the same list on
  /// each). `number` counts the splits of this group, those without this rank too: ranks that have left out a
  /// split would count others. Two parts of one backend that share a third split it twice, with one number,
  /// in the same order on each rank. Returns null if the backend cannot split without a store; the caller
  /// then connects a new group.
  virtual std::unique_ptr<Backend> split(std::span<const int> /*members*/, int /*number*/) { return nullptr; }
  /// True if operations on device memory may be captured in a CUDA graph and replayed.
  virtual bool capturable() const { return false; }
  /// Why graphs with operations of this backend must not copy between host and device memory besides; empty:
  /// they may.
  virtual std::string reason_against_copies_in_graphs() const { return ""; }
  /// True if this host-memory backend accepts device buffers in collectives that only move data. May differ
  /// between ranks; a group uses it only if it holds on all ranks.
  virtual bool moves_device_memory() const { return false; }
  /// Allocates memory on which this backend is zero-copy.
  virtual std::shared_ptr<std::byte> allocate(std::size_t bytes) = 0;
  /// Collective form of allocate(): every rank calls it with the same size. The memory is mapped on all
  /// ranks, where the backend has such memory.
  virtual std::shared_ptr<std::byte> allocate_symmetric(std::size_t bytes) { return allocate(bytes); }
  /// The algorithm of a call, and the reason. `bytes` is the size of the larger buffer. `reachable`: all
  /// ranks' buffers are zero-copy memory of this backend. No communication; any thread.
  virtual AlgorithmChoice explain(Collective, std::size_t /*bytes*/, bool /*reachable*/, DType,
                                  ReduceOp) const {
    return {"its own", describe(), 0, "this backend chooses by itself"};
  }
  /// The host memory that this rank shares with peers, for groups that are split from this one; null: none.
  virtual std::shared_ptr<SharedMemoryAllocator> shared_memory() const { return nullptr; }
  /// What detects failures of this group, for groups that are split from it; null: none.
  virtual std::shared_ptr<class LinkMonitor> link_monitor() const { return nullptr; }
  /// Makes the caller's host memory zero-copy until the returned registration ends.
  virtual Registration register_buffer(std::span<std::byte>) {
    return Registration(describe() + " copies host memory as its library does; there is nothing to register");
  }
  /// Short description for reports, such as "native over shm".
  virtual std::string describe() const = 0;
};

}  // namespace rz
