#pragma once
/// Interface of what a progress engine drives: the calls of one communicator, by one way of moving data.

#include <chrono>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "comm/progress/request.h"

namespace rz {

/// The thread that holds the progress token calls all of it, except wake() and abort().
class Progressable {
 public:
  using Time = std::chrono::steady_clock::time_point;

  virtual ~Progressable() = default;
  /// Queues the calls of a request, which lives until its last call has ended or fail() returns.
  virtual void accept(const std::shared_ptr<Request>&) = 0;
  /// Moves data without blocking; true on any progress. `eager`: it may spin. Appends to `ended` the request
  /// of each call that has ended. Throws what fails the group.
  virtual bool advance(bool eager, std::vector<Request*>& ended) = 0;
  /// Polls failures, control messages and deadlines while calls are in flight. `oldest` is the oldest request
  /// in flight, or null. `waited_for`: the driving thread is in wait(). Throws what fails the group.
  virtual void poll(Time now, const Request* oldest, bool waited_for) = 0;
  /// Polls failures and control messages while no call is in flight. Throws what fails the group.
  virtual void poll_idle() = 0;
  /// Sleeps until something may have changed, at most `max`. `eager`: it may spin first.
  virtual void wait(std::chrono::microseconds max, bool eager) = 0;
  /// For a thread that waits for several communicators at once. Returns a descriptor that is readable once
  /// something may have changed or after wake(); end_sleep() must follow. Returns -1 if something may have
  /// changed. Without such a descriptor it waits itself, for a millisecond at most, and returns -1.
  virtual int begin_sleep() = 0;
  /// Ends begin_sleep() >= 0. In between only wake() and abort() are called.
  virtual void end_sleep() {}
  /// Makes wait() return. Any thread.
  virtual void wake() noexcept {}

  /// Reports the failure to the other ranks, unless it came from them, and drops all calls. Returns what the
  /// calls of this rank end with: where all ranks throw the same, that. `destroyed`: this rank destroys its
  /// communicator while calls are in flight.
  virtual std::exception_ptr fail(const std::exception_ptr&, bool destroyed) noexcept = 0;
  /// Reports to the other ranks that this one aborts the group, where no thread has to progress for that. Any
  /// thread.
  virtual void abort(const std::string& /*reason*/) noexcept {}
  /// After fail(): throws Errc::peer_lost if a peer has ended without a goodbye since.
  virtual void check_peers() {}
  /// Last call before the destructor. No call is in flight.
  virtual void close() noexcept {}
  /// Last call, in a child of fork(): closes its copies of descriptors and mappings.
  virtual void abandon() noexcept {}
};

}  // namespace rz
