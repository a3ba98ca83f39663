#pragma once
/// Progress engine of a communicator over MPI. One thread at a time progresses its operations and makes its
/// MPI calls: a thread blocked in Work::wait(), otherwise the progress thread. Without MPI_THREAD_MULTIPLE
/// there is no progress thread.
///
/// Before a collective starts, all ranks verify that they make the same call: an MPI_Iallreduce of a hash of
/// the call's signature, run ahead for queued calls. MPI therefore never executes mismatched collectives, and
/// a deadline that expires before the start is distinguished from one during execution: the engine queries
/// the other ranks and names those that did not make the call or made another.

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

/// Two communicators with the same ranks and MPI_ERRORS_RETURN: one for call verification and control
/// messages, one for data.
struct CommPair {
  MPI_Comm control = MPI_COMM_NULL, data = MPI_COMM_NULL;
};

class MpiEngine : public std::enable_shared_from_this<MpiEngine> {
 public:
  /// Takes ownership of the communicators.
  MpiEngine(MpiRuntime&, CommPair, int rank, int size, const MpiOptions&);

  void start();
  /// Called when the communicator is destroyed: pending requests fail. Blocks for at most a few seconds; the
  /// rest of the departure happens in the background.
  void stop() noexcept;

  /// Throws the group's failure if there is one.
  std::shared_ptr<MpiRequest> submit(std::span<const CollectiveCall> group);
  void wait(const MpiRequest&);
  /// Progresses pending requests once; used without a progress thread.
  void progress() noexcept;
  void abort(const std::string& reason) noexcept;
  /// Collective over `members`, which must be the same list on each of them. Returns communicators of these
  /// ranks.
  CommPair split(std::span<const int> members);

  bool has_progress_thread() const { return runtime_.thread_multiple(); }
  MpiRuntime& runtime() const { return runtime_; }
  const MpiOptions& options() const { return options_; }

 private:
  /// A collective in flight.
  struct Call {
    std::shared_ptr<MpiRequest> request;
    std::size_t operation_index = 0;
    CallSignature signature;
    std::uint64_t proposal[2], reduced[2];  // maxima over all ranks; complementary iff all hashes are equal
    MPI_Request agreement_request = MPI_REQUEST_NULL;
    bool proposed = false, started = false;
    std::vector<Stage> stages;
    std::size_t stage_index = 0;
    Requests mpi_requests;
  };
  /// A failure reported by another rank. This rank first completes the calls that the sender had completed,
  /// within a bounded time, since control messages overtake collectives.
  struct RemoteFailure {
    Error error;
    std::uint64_t calls;
    std::chrono::steady_clock::time_point until;
  };
  /// Query of all ranks' progress after a deadline.
  struct TimeoutInquiry {
    std::uint32_t sequence;
    std::chrono::steady_clock::time_point until;
    std::vector<std::optional<ControlMessage>> replies;
    int pending_replies;
  };

  void progress_thread();
  bool acquire_progress(std::unique_lock<std::mutex>&);
  void release_progress(std::unique_lock<std::mutex>&);

  // These are called only by the thread that holds progress_held_.
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
  [[noreturn]] void fail_timeout(const std::string& reason, int culprit, const std::string& operation) const;
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
  std::condition_variable changed_;       // for waiters: a request completed, or progress_held_ was released
  std::condition_variable work_arrived_;  // for the progress thread
  std::deque<std::shared_ptr<MpiRequest>> incoming_;
  std::size_t unfinished_ = 0;
  bool progress_held_ = false, stopping_ = false, departing_ = false, poisoned_ = false;
  std::exception_ptr failure_;
  std::chrono::steady_clock::time_point last_use_{};

  std::atomic<bool> inbox_changed_{false};  // incoming_, stopping_ or failure_ changed

  // Used by the thread that holds progress_held_.
  ControlChannel control_;
  MpiPointToPoint point_to_point_;
  Operators operators_;
  std::deque<Call> queue_;
  std::deque<CallSignature> recent_calls_;  // completed calls, latest last
  std::uint32_t next_sequence_ = 0;
  std::optional<TimeoutInquiry> inquiry_;
  std::optional<RemoteFailure> remote_failure_;
  std::vector<std::optional<ControlMessage>> departed_;  // each departed rank's last message
  std::chrono::steady_clock::time_point next_control_poll_{};
  unsigned idle_spins_ = 0;
  bool failure_is_remote_ = false;  // the failure came from another rank
  int split_count_ = 0;
};

/// Duplicates `comm` twice. Errc::timeout if not all ranks join.
CommPair duplicate(MPI_Comm comm, std::chrono::milliseconds timeout);
/// Takes ownership of `comm` and duplicates it once.
CommPair adopt(MPI_Comm comm, std::chrono::milliseconds timeout);

}  // namespace rz::mpi
