#pragma once
/// The seam for whole collectives: ours (scheduled), MPI's, and later those of NCCL and CUDA peers.

#include <chrono>
#include <memory>
#include <span>
#include <string>

#include "comm/collective.h"
#include "comm/explain.h"
#include "comm/registration.h"
#include "comm/work.h"

namespace rz {

class Backend {
 public:
  virtual ~Backend() = default;
  /// In a child of fork(), where no destructor runs: closes what it may, and tells nobody.
  virtual void abandon() noexcept {}
  /// Starts the operations as one: they may run in any order and together, and the Work ends when all have.
  /// The arguments have been checked. Thread-safe: calls of several threads are put in one order.
  virtual Work submit(std::span<const CollectiveCall> group) = 0;
  /// submit() of one call that is like the last one but for its memory, where that is faster; the arguments
  /// have been checked. False: it was not begun.
  virtual bool try_fast_path(const CallKey&, Work&) { return false; }
  /// Ends every operation in flight, here and on the other ranks, with Errc::aborted. Any thread, idempotent,
  /// bounded.
  virtual void abort(const std::string& reason) noexcept = 0;
  /// Throws what has broken the group, if this rank can know of anything; never blocks. For who waits for
  /// peers by other means than Work::wait().
  virtual void check() {}
  /// All that a stream holds now, for who waits for runs of a graph, of which a backend knows nothing else.
  /// Its wait() throws what breaks the group, and by `limit` names who is missing. None: look at check().
  virtual std::shared_ptr<WorkState> watch_stream(const Stream&, std::chrono::milliseconds /*limit*/) {
    return nullptr;
  }
  /// A backend for the given ranks of this one, in their new order; each of them calls it, with the same
  /// list, and no other rank does. None where ranks have to meet in a store for that.
  virtual std::unique_ptr<Backend> split(std::span<const int> /*members*/) { return nullptr; }
  /// Whether operations on device memory may be captured in CUDA graphs, whose runs repeat them.
  virtual bool capturable() const { return false; }
  /// Whether a backend of host memory takes a device's too, in what moves and does not combine. May differ
  /// from rank to rank; a group uses it on all or on none.
  virtual bool moves_device_memory() const { return false; }
  /// Memory that this backend moves without copying.
  virtual std::shared_ptr<std::byte> allocate(std::size_t bytes) = 0;
  /// The same, called by every rank together with as many bytes: memory that all reach at one place, where
  /// that makes a difference.
  virtual std::shared_ptr<std::byte> allocate_symmetric(std::size_t bytes) { return allocate(bytes); }
  /// What a call of so many bytes, of the whole buffer, takes, and why; `reachable`: of memory that this
  /// backend moves without copying, on every rank. Asks nobody; any thread.
  virtual AlgorithmChoice explain(Collective, std::size_t /*bytes*/, bool /*reachable*/, DType,
                                  ReduceOp) const {
    return {"its own", describe(), 0, "this backend chooses by itself"};
  }
  /// Host memory of the caller's, to be moved without copying, until the registration ends.
  virtual Registration register_buffer(std::span<std::byte>) {
    return Registration(describe() + " copies host memory as its library does; there is nothing to register");
  }
  /// "native over shm", for reports.
  virtual std::string describe() const = 0;
};

}  // namespace rz
