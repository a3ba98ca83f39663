#pragma once
/// Moves a communicator's operations over MPI. At any time one thread drives, which alone calls MPI for it: a
/// progress thread, or whoever waits. Without MPI_THREAD_MULTIPLE there is no progress thread.
///
/// Before a collective begins, all ranks agree that it is the same one: a small reduction of what identifies
/// the call, run ahead for the calls that are queued. So MPI never sees collectives that do not match, and a
/// deadline that passes before can be told from one that passes within: those who did not come, or come to
/// something else, are asked for and named.

#include <mpi.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "comm/backends/mpi/control_channel.h"
#include "comm/backends/mpi/mpi.h"
#include "comm/backends/mpi/mpi_request.h"
#include "comm/backends/mpi/mpi_runtime.h"
#include "comm/backends/mpi/point_to_point.h"
#include "comm/backends/mpi/stages.h"

namespace rz::mpi {

/// Two communicators of the same ranks, whose errors are returned: one for agreements and notes, one for
/// data.
struct CommPair {
  MPI_Comm control = MPI_COMM_NULL, data = MPI_COMM_NULL;
};

class MpiEngine : public std::enable_shared_from_this<MpiEngine> {
 public:
  /// The communicators become the engine's.
  MpiEngine(MpiRuntime&, CommPair, int rank, int size, const MpiOptions&);

  void start();
  /// The communicator is destroyed: what is pending ends with an error. Bounded; the rest happens in the
  /// background.
  void stop() noexcept;

  /// Throws the failure that poisoned the group, if there is one.
  std::shared_ptr<MpiRequest> submit(std::span<const CollectiveCall> group);
  void wait(const MpiRequest&);
  /// Without a progress thread: moves what can be moved.
  void progress() noexcept;
  void abort(const std::string& reason) noexcept;
  /// Two communicators of some of the ranks; each of them calls it with the same list.
  CommPair split(std::span<const int> members);

  bool has_progress_thread() const { return runtime_.thread_multiple(); }
  MpiRuntime& runtime() const { return runtime_; }
  const MpiOptions& options() const { return options_; }

 private:
  /// A collective on its way.
  struct Call {
    std::shared_ptr<MpiRequest> request;
    std::size_t operation_index = 0;
    CallSignature signature;
    std::uint64_t proposal[2], reduced[2];  // the largest of each: alike if all are
    MPI_Request agreement_request = MPI_REQUEST_NULL;
    bool proposed = false, started = false;
    std::vector<Stage> stages;
    std::size_t stage_index = 0;
    Requests mpi_requests;
  };
  /// Another rank's failure: what its sender had ended, this rank ends first, within a bounded time. Notes
  /// are faster than collectives.
  struct RemoteFailure {
    Error error;
    std::uint64_t calls;
    std::chrono::steady_clock::time_point until;
  };
  /// Who is where, asked when a deadline has passed.
  struct TimeoutInquiry {
    std::uint32_t sequence;
    std::chrono::steady_clock::time_point until;
    std::vector<std::optional<ControlMessage>> replies;
    int pending_replies;
  };

  void progress_thread();
  bool acquire_progress(std::unique_lock<std::mutex>&);
  void release_progress(std::unique_lock<std::mutex>&);

  // All of these are called by the one that drives.
  void progress_until(const MpiRequest* until);
  void progress_once();
  void accept_submitted();
  void propose();
  bool advance_front();
  bool check_agreement(Call&);
  bool advance_stages(Call&);
  void complete_operation(MpiRequest&);
  void receive_control();
  void handle_control(int peer, const ControlMessage&);
  void check_remote_failure() const;
  ControlMessage reply_to(const ControlMessage& query) const;
  void check_departed() const;
  void on_idle();
  void check_deadlines();
  void start_inquiry(const Call&);
  void conclude_inquiry();
  [[noreturn]] void fail_timeout(const std::string& who, int culprit, const std::string& what) const;
  void poison(std::exception_ptr) noexcept;
  void depart() noexcept;
  void free_comms();
  bool is_idle() const {
    return queue_.empty() && point_to_point_.is_idle() && !inbox_changed_.load(std::memory_order_acquire);
  }

  MpiRuntime& runtime_;
  const CommPair comms_;
  const int rank_, size_;
  const MpiOptions options_;
  const MpiContext context_;

  // Guarded by mutex_.
  std::mutex mutex_;
  std::condition_variable changed_;       // for waiters: a job ended, or nobody drives any more
  std::condition_variable work_arrived_;  // for the progress thread
  std::deque<std::shared_ptr<MpiRequest>> incoming_;
  std::size_t unfinished_ = 0;
  bool progress_held_ = false, stopping_ = false, departing_ = false, poisoned_ = false;
  std::exception_ptr failure_;
  std::chrono::steady_clock::time_point last_use_{};

  std::atomic<bool> inbox_changed_{false};  // incoming_, stopping_ or failure_ changed

  // Belongs to whoever drives.
  ControlChannel control_;
  MpiPointToPoint point_to_point_;
  Operators operators_;
  std::deque<Call> queue_;
  std::deque<CallSignature> recent_calls_;  // the last few
  std::uint32_t next_sequence_ = 0;
  std::optional<TimeoutInquiry> inquiry_;
  std::optional<RemoteFailure> remote_failure_;
  std::vector<std::optional<ControlMessage>> departed_;  // a rank's last note
  std::chrono::steady_clock::time_point next_control_poll_{};
  unsigned idle_spins_ = 0;
  bool failure_is_remote_ = false;  // the failure came from another rank
  int split_count_ = 0;
};

/// Duplicates `comm` twice, by the deadline.
CommPair duplicate(MPI_Comm comm, std::chrono::milliseconds timeout);
/// Takes `comm` over, and duplicates it.
CommPair adopt(MPI_Comm comm, std::chrono::milliseconds timeout);

}  // namespace rz::mpi
