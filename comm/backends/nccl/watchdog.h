#pragma once
/// Sees to it that every operation ends: a thread that sleeps while nothing is in flight, looks at NCCL's
/// asynchronous errors while something is, and ends the communicator when a deadline passes, NCCL fails,
/// somebody aborts, or another rank did so.
///
/// Ranks tell each other nothing on the way. Once an operation is too late its rank raises an alarm in the
/// store and says where it stands; ranks that wait for over a second see the alarm, and answer. Whoever is
/// behind is named. The first verdict in the store counts for all.

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
#include "comm/store.h"

namespace rz::nccl {

struct WatchdogOptions {
  int rank = 0, size = 1;
  std::chrono::milliseconds timeout{600'000};      ///< of one operation, from its submission
  std::chrono::milliseconds abort_limit{2'000};    ///< for ncclCommAbort
  std::chrono::milliseconds inquiry_limit{1'500};  ///< for the other ranks' answers
};

/// Thread-safe.
class Watchdog {
 public:
  /// `host` is aborted with NCCL; `keep` is what NCCL's operations use, held until NCCL lets go of it.
  Watchdog(std::shared_ptr<NcclComm>, std::shared_ptr<Store>, std::shared_ptr<Backend> host,
           std::shared_ptr<void> keep, const WatchdogOptions&);
  ~Watchdog();

  /// Numbers the calls of a submission and starts its deadline; throws the failure if there is one.
  std::shared_ptr<NcclRequest> begin(std::span<const CollectiveCall>);
  /// The operations are in streams.
  void mark_issued(const std::shared_ptr<NcclRequest>&, Event ready, Event end, bool captured);
  /// Follows what a stream holds now. Throws as begin().
  std::shared_ptr<NcclRequest> watch_stream(const Stream&, std::chrono::milliseconds limit);
  /// This rank could not put all of them there, which ends the group. Throws what it ends with.
  [[noreturn]] void fail_submission(const NcclError&);
  [[noreturn]] void fail_submission(Failure);
  /// Returns once NCCL is aborted, but within a second.
  void abort(const std::string& reason) noexcept;
  /// Ends what is in flight with peer_lost on the other ranks; true if nothing was, and nothing failed.
  bool depart() noexcept;

  const std::shared_ptr<GroupStatus>& group_status() const { return group_status_; }

 private:
  struct Termination {
    Failure failure;
    bool query_ranks;  // and blame those who lag
  };
  void run();
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
  std::vector<std::shared_ptr<NcclRequest>> watched_streams_;  // of callers, which they wait for
  CallProgress call_progress_;
  std::optional<Termination> termination_;
  bool stopping_ = false;

  // The thread's own.
  Deadline next_store_poll_ = Deadline::after({});
  bool store_responsive_ = true;

  std::thread thread_;
};

}  // namespace rz::nccl
