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
#include "comm/backends/nccl/job.h"
#include "comm/backends/nccl/link.h"
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
  Watchdog(std::shared_ptr<Link>, std::shared_ptr<Store>, std::shared_ptr<Backend> host,
           std::shared_ptr<void> keep, const WatchdogOptions&);
  ~Watchdog();

  /// Numbers the calls of a submission and starts its deadline; throws the failure if there is one.
  std::shared_ptr<Job> begin(std::span<const Operation>);
  /// The operations are in streams.
  void issued(const std::shared_ptr<Job>&, Event ready, Event end, bool captured);
  /// Follows what a stream holds now. Throws as begin().
  std::shared_ptr<Job> follow(const Stream&, std::chrono::milliseconds limit);
  /// This rank could not put all of them there, which ends the group. Throws what it ends with.
  [[noreturn]] void broken(const CallFailed&);
  [[noreturn]] void broken(Failure);
  /// Returns once NCCL is aborted, but within a second.
  void abort(const std::string& reason) noexcept;
  /// Ends what is in flight with peer_lost on the other ranks; true if nothing was, and nothing failed.
  bool leave() noexcept;

  const std::shared_ptr<Fate>& fate() const { return fate_; }

 private:
  struct Request {
    Failure failure;
    bool inquire;  // and blame those who lag
  };
  void run();
  void retire();
  std::shared_ptr<Job> most_urgent() const;
  std::optional<Request> look(const Job& front);
  std::optional<Request> look_into_store(const Job& front);
  void end(Request, const std::shared_ptr<Job>& front);
  Failure inquire(Failure, const Job* front);
  Failure agree(const Failure& mine);
  Standing standing();
  void ask(Request);

  const std::shared_ptr<Link> link_;
  const std::shared_ptr<Store> store_;
  const std::shared_ptr<Backend> host_;
  const std::shared_ptr<void> keep_;
  const WatchdogOptions options_;
  const std::shared_ptr<Fate> fate_ = std::make_shared<Fate>();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Job>> jobs_;      // in the order of the backend's stream
  std::vector<std::shared_ptr<Job>> streams_;  // of callers, which they wait for
  Standing standing_;
  std::optional<Request> request_;
  bool stopping_ = false;

  // The thread's own.
  Deadline next_look_into_store_ = Deadline::after({});
  bool store_answers_ = true;

  std::thread thread_;
};

}  // namespace rz::nccl
