#pragma once
/// The calls of a communicator over MPI, for its progress engine, which lets one thread at a time make MPI
/// calls.

#include <mpi.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "comm/backends/mpi/comm_pair.h"
#include "comm/backends/mpi/control_channel.h"
#include "comm/backends/mpi/mpi.h"
#include "comm/backends/mpi/mpi_runtime.h"
#include "comm/backends/mpi/point_to_point.h"
#include "comm/backends/mpi/timeout_inquiry.h"
#include "comm/backends/mpi/verified_collectives.h"
#include "comm/core/error.h"
#include "comm/core/long_wait.h"
#include "comm/os/flight_recorder.h"
#include "comm/progress/progressable.h"

namespace rz::mpi {

/// Period of poll_idle(): an inquiry waits for the replies of idle ranks.
inline constexpr auto idle_poll = std::chrono::milliseconds(100);

class MpiCalls final : public Progressable {
 public:
  /// Takes ownership of the communicators.
  MpiCalls(MpiRuntime&, CommPair, int rank, int size, const MpiOptions&);

  void accept(const std::shared_ptr<Request>&) override;
  bool advance(bool eager, std::vector<Request*>& ended) override;
  void poll(Time now, const Request* oldest, bool waited_for) override;
  void poll_idle() override;
  void wait(std::chrono::microseconds max, bool eager) override;
  /// MPI has no descriptor.
  int begin_sleep() override { return wait({}, false), -1; }
  std::exception_ptr fail(const std::exception_ptr&, bool destroyed) noexcept override;
  /// Departs from the group, and ends the departure that the runtime waits for.
  void close() noexcept override;

  /// Requires the progress token. Collective over `members`; Backend::split(). Errc::timeout names the
  /// members that do not come within MpiOptions::rendezvous_timeout.
  CommPair split(std::span<const int> members, int number);

 private:
  /// A failure reported by another rank. This rank first completes the calls that the sender had completed,
  /// within a bounded time, since control messages overtake collectives.
  struct RemoteFailure {
    Error error;
    std::uint64_t calls;
    Time until;
  };

  void require_open(const MpiRuntime::Use&) const;
  void record_front();
  void receive_control();
  void handle_control(int peer, const ControlMessage&);
  ControlMessage reply_to(const ControlMessage& query) const;
  void check_remote_failure() const;
  void check_departed() const;
  void check_deadlines(Time now);
  void check_long_waits(Time now);
  void gather_members(std::span<const int> members, std::uint32_t number);
  void follow(int first, std::uint32_t number);
  /// The last message of a rank before the split of that number; null: none.
  const ControlMessage* gathering_of(int peer, std::uint32_t number) const;
  void depart();
  /// Leaks what MPI may still use. Calls MPI only if it is `open`.
  void leak(bool open) noexcept;
  bool all_departed() const;
  bool is_idle() const { return collectives_.is_idle() && point_to_point_.is_idle(); }

  MpiRuntime& runtime_;
  const CommPair comms_;
  const int rank_, size_;
  const MpiOptions options_;
  ControlChannel control_;
  VerifiedCollectives collectives_;
  MpiPointToPoint point_to_point_;
  std::optional<TimeoutInquiry> inquiry_;  // of the first collective
  bool reports_ = false;                   // inquiry_ is for a report of a wait, before the deadline
  LongWait long_wait_;
  flight::Recorder flight_;
  std::uint32_t recorded_ = 0;  // collectives that flight_ has, the last of them perhaps in flight
  std::optional<RemoteFailure> remote_failure_;
  std::vector<std::optional<ControlMessage>> departed_;  // each departed rank's last message
  Time next_control_poll_{};
  std::vector<std::optional<ControlMessage>> gatherings_;  // each rank's last message before a split
  bool split_hangs_ = false;  // a thread of MpiRuntime::call_within() may still use comms_
  unsigned idle_turns_ = 0;   // without progress
  bool failed_ = false;
};

}  // namespace rz::mpi
