#pragma once
/// A handle on an operation in flight.

#include <memory>

#include "comm/device/stream.h"

namespace rz {

class WorkState;

/// Copyable; all copies stand for the same operation. Dropping the last one neither cancels nor loses the
/// operation: a failure that nobody waited for poisons the communicator and is thrown by its next call.
class [[nodiscard]] Work {
 public:
  /// Nothing to wait for.
  Work() = default;
  explicit Work(std::shared_ptr<WorkState> state) : state_(std::move(state)) {}

  /// True once the operation has ended, well or badly. Never blocks, never throws.
  bool done() const noexcept;
  /// Blocks the calling thread until the operation has ended, and throws what went wrong: peer_lost, timeout,
  /// mismatch, aborted. The thread may move the operation forward itself. Any number of times, any thread.
  void wait() const;
  /// Orders `stream` after the operation, without blocking the host where the operation runs in streams. A
  /// host stream is the calling thread's order: there it is wait().
  void wait_on(const Stream& stream) const;

 private:
  std::shared_ptr<WorkState> state_;
};

/// What a backend keeps of an operation. The backend calls finish() once; everybody else waits.
class WorkState {
 public:
  virtual ~WorkState() = default;
  virtual bool done() const noexcept = 0;
  virtual void wait() = 0;
  /// Orders a CUDA stream after the operation; whoever has no events waits.
  virtual void wait_on(const Stream&) { wait(); }
};

}  // namespace rz
