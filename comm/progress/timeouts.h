#pragma once
/// Deadlines of requests over a transport, and the culprit of one that expires.
///
/// The peer that this rank waits for may itself wait for the culprit, since schedules relay. So the wait-for
/// graph is requested shortly before the deadline; every rank that is in a call replies at once. Used with
/// the progress token.

#include <chrono>

#include "comm/progress/request.h"
#include "comm/transport/transport.h"
#include "comm/transport/wait_for_graph.h"

namespace rz {

class Timeouts {
 public:
  using Time = std::chrono::steady_clock::time_point;

  /// `timeout`: of a request, from its submission.
  Timeouts(Transport& transport, int rank, std::chrono::milliseconds timeout)
      : transport_(transport), rank_(rank), timeout_(timeout) {}

  /// Watches the deadlines of the request whose call runs and of the oldest one; either may be null. Queries
  /// all peers once a deadline is near. Returns the request to fail(), or null.
  const Request* check(Time now, const Request* current, const Request* oldest);
  /// Fails the group with Errc::timeout; `wait` is what the request waits for.
  [[noreturn]] void fail(const Request&, const WaitState& wait) const;

 private:
  Transport& transport_;
  const int rank_;
  const std::chrono::milliseconds timeout_;
  Time queried_{};    // deadline of the request for which the peers were queried
  Time decide_at_{};  // when the replies are evaluated
};

}  // namespace rz
