#pragma once
/// Handle of an asynchronous operation.

#include <memory>

#include "device/stream.h"

namespace rz {

/// State of an operation, implemented by a backend.
class WorkState {
 public:
  virtual ~WorkState() = default;
  /// These do what Work::done() and Work::wait() do.
  virtual bool done() const noexcept = 0;
  virtual void wait() = 0;
  /// Orders a CUDA stream after the operation. The default, for backends without events, blocks in wait().
  virtual void wait_on(const Stream&) { wait(); }
};

/// Handle of an operation; copies refer to the same operation. Destroying the last copy does not cancel it. A
/// failure that no wait() reported poisons the communicator and is thrown by its next call.
class [[nodiscard]] Work {
 public:
  /// An operation that has ended.
  Work() = default;
  explicit Work(std::shared_ptr<WorkState> state) : state_(std::move(state)) {}

  /// True once the operation has ended, with or without an error. Never blocks, never throws.
  bool done() const noexcept { return !state_ || state_->done(); }
  /// Blocks until the operation has ended. Throws its failure: Errc::peer_lost, timeout, mismatch or aborted.
  /// The calling thread may progress the operation itself. Any thread, any number of times.
  void wait() const {
    if (state_) state_->wait();
  }
  /// Orders `stream` after the operation. Does not block the host if the operation runs in a CUDA stream. On
  /// a host stream it is wait().
  void wait_on(const Stream& stream) const {
    if (!state_) return;
    stream.device().kind == Device::host ? state_->wait() : state_->wait_on(stream);
  }

 private:
  std::shared_ptr<WorkState> state_;
};

}  // namespace rz
