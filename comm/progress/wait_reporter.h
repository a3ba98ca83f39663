#pragma once
/// Reports calls of a communicator that have made no progress for long (CommOptions::on_wait): one line for
/// each such wait, with the ranks that are missing and what these do instead.
///
/// The peers are queried once a wait is long. A rank that is in a call replies for whom it waits; one that is
/// in no call of this communicator replies with the long waits of its process in others. Used with the
/// progress token.

#include <chrono>
#include <string>

#include "comm/core/long_wait.h"
#include "comm/transport/transport.h"
#include "comm/transport/wait_for_graph.h"

namespace rz {

/// describe(), or the name of a message, whose number is that of a pair of ranks.
std::string describe_call(const CallSignature&);

class WaitReporter {
 public:
  using Time = std::chrono::steady_clock::time_point;

  /// Without `report` it does nothing.
  WaitReporter(Transport&, int rank, int size, WaitReportOptions);
  ~WaitReporter();
  WaitReporter(const WaitReporter&) = delete;

  /// `request` waits, or none if it is null; `moved`: a call has progressed since the last poll. True if it
  /// is now to be reported: `after` has passed, and peers had time to reply. `call` and `waiting_on` describe
  /// the request; they are called only if its wait is long.
  template <class Call, class Waiting>
  void poll(Time now, const void* request, bool moved, const Call& call, const Waiting& waiting_on) {
    if (!options_.report) return;
    if (moved || request != request_) restart(now, request);
    if (!request || now < next_) return;
    advance(now, call(), waiting_on());
  }
  /// The long waits of this process, as one text; empty if there are none. `but`: that are not of this one.
  static std::string of_process(const WaitReporter* but = nullptr);

 private:
  void restart(Time now, const void* request);
  void advance(Time now, const std::string& call, const WaitState&);
  void set_long_wait(std::string);
  bool replied(const WaitState&) const;
  std::string reason(const WaitState&) const;

  Transport& transport_;
  const int rank_, size_;
  const WaitReportOptions options_;
  const void* request_ = nullptr;
  Time since_{}, next_ = Time::max();
  Time decide_at_{};      // when the line is written even if replies are missing
  bool queried_ = false;  // the wait is long, and listed in the process

  // Of the list of the process, used with its mutex.
  WaitReporter* next_of_process_ = nullptr;
  std::string long_wait_;
};

}  // namespace rz
