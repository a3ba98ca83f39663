#pragma once
/// Ensures that every operation ends. The watchdog thread sleeps while nothing is in flight; otherwise it
/// polls NCCL's asynchronous errors. It terminates the communicator when a deadline passes, NCCL fails, or
/// this or another rank aborts.
///
/// Ranks exchange nothing during normal operation. A rank with an overdue operation raises an alarm in the
/// store and publishes its progress. Ranks with an operation in flight for over a second poll for the alarm
/// and publish theirs. The rank that is behind is the culprit. The first failure published in the store
/// applies to all ranks.

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "comm/backend.h"
#include "comm/backends/nccl/nccl_comm.h"
#include "comm/backends/nccl/nccl_request.h"
#include "comm/core/long_wait.h"
#include "comm/store.h"

namespace rz::nccl {

struct WatchdogOptions {
  int rank = 0, size = 1;
  std::chrono::milliseconds timeout{600'000};      ///< of one operation, from its submission
  std::chrono::milliseconds abort_limit{2'000};    ///< for ncclCommAbort
  std::chrono::milliseconds inquiry_limit{1'500};  ///< for the other ranks' replies
  WaitReportOptions waits;
};

/// Thread-safe.
class Watchdog {
 public:
  /// `host` is aborted together with NCCL. `keep` holds the resources of NCCL's operations until
  /// ncclCommAbort returns.
  Watchdog(std::shared_ptr<NcclComm>, std::shared_ptr<Store>, std::shared_ptr<Backend> host,
           std::shared_ptr<void> keep, const WatchdogOptions&);
  ~Watchdog();

  /// Registers a submission: numbers its calls and starts its deadline. Throws the group's failure if there
  /// is one.
  std::shared_ptr<NcclRequest> begin(std::span<const CollectiveCall>);
  /// The operations are enqueued. Captured ones are no longer watched.
  void mark_issued(const std::shared_ptr<NcclRequest>&, Event ready, Event end, bool captured);
  /// Watches the current work of a stream until it completes or `limit` passes. Throws as begin().
  std::shared_ptr<NcclRequest> watch_stream(const Stream&, std::chrono::milliseconds limit);
  /// An operation could not be enqueued, which fails the group. Throws the group's failure.
  [[noreturn]] void fail_submission(const NcclError&);
  [[noreturn]] void fail_submission(Failure);
  /// Returns once NCCL is aborted, or after 0.9 s. The host's calls of a group that is cancelled are ended by
  /// the caller.
  void abort(const Failure&) noexcept;
  /// If operations are in flight, fails the group with peer_lost. True if none were and the group had not
  /// failed.
  bool depart() noexcept;

  const std::shared_ptr<GroupStatus>& group_status() const { return group_status_; }

 private:
  struct Termination {
    Failure failure;
    bool query_ranks;  // query the ranks' progress to find the culprit
  };
  void run();
  void report_long_wait(const NcclRequest&);
  void retire_completed();
  std::shared_ptr<NcclRequest> earliest_deadline() const;
  std::optional<Termination> check_communicator(const NcclRequest& front);
  std::optional<Termination> check_store(const NcclRequest& front);
  void terminate(Termination, const std::shared_ptr<NcclRequest>& front);
  Failure query_ranks(Failure, const NcclRequest* front);
  Failure elect_failure(const Failure& mine);
  CallProgress call_progress();
  void request_termination(Termination);

  const std::shared_ptr<NcclComm> nccl_comm_;
  const std::shared_ptr<Store> store_;
  const std::shared_ptr<Backend> host_;
  const std::shared_ptr<void> kept_alive_;
  const WatchdogOptions options_;
  const std::shared_ptr<GroupStatus> group_status_ = std::make_shared<GroupStatus>();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<NcclRequest>> requests_;          // in the order of the backend's stream
  std::vector<std::shared_ptr<NcclRequest>> watched_streams_;  // callers' streams
  CallProgress call_progress_;
  std::optional<Termination> termination_;
  bool stopping_ = false;

  // Used by the thread only.
  LongWait long_wait_;
  Deadline next_store_poll_ = Deadline::after({});
  bool store_responsive_ = true;

  std::thread thread_;
};

}  // namespace rz::nccl
