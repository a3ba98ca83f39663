#pragma once
/// Progress engine of a native communicator. Requests are progressed by exactly one thread at a time, the
/// driving thread: a thread in Work::wait(), otherwise the progress thread. All others sleep.
///
/// The progress thread polls for unattended requests every 1 ms if there was one in the last second,
/// otherwise every 16 ms, since each poll competes with the ranks for cores. After 1 s without a call it
/// sleeps; a submission then wakes it, and once a second it polls for failures and for memory that peers have
/// freed. A submission does not wake it before, since callers mostly wait at once and then drive the request
/// themselves.

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "comm/backends/native/native_options.h"
#include "comm/explain.h"
#include "comm/intranode/engine.h"
#include "comm/os/process.h"
#include "comm/os/spin_futex_lock.h"
#include "comm/progress/coalescer.h"
#include "comm/progress/point_to_point.h"
#include "comm/progress/request.h"
#include "comm/schedule/executor.h"
#include "comm/tuning/overrides.h"
#include "comm/tuning/select.h"

namespace rz {

class ProgressEngine : public std::enable_shared_from_this<ProgressEngine> {
 public:
  ProgressEngine(int rank, int size, std::unique_ptr<Transport>, NativeOptions);
  ~ProgressEngine();

  void start_thread();
  /// Fails all pending requests with Errc::aborted, joins the thread and closes the transport. Waits 5 s at
  /// most for another driving thread.
  void stop() noexcept;
  /// Replaces the destructor in a child of fork(), which has no progress thread, and whose condition
  /// variables may have waiters that do not exist there. Closes the transport's descriptors if no thread was
  /// driving at fork().
  void abandon() noexcept;

  // Thread safe. In a child of fork() they throw Errc::invalid_argument, but for abort(), describe() and
  // explain().

  /// try_inline() of a call with the plan of the last one. A failure is reported by the request, not thrown.
  bool try_fast_path(const CallKey&, std::shared_ptr<Request>&);
  /// Runs a small intra-node collective on the calling thread. False: not eligible, or other requests are
  /// pending; call submit(). True: started; complete if the request is null, else the request completes
  /// later. Throws the failure that poisoned the group, if there is one.
  bool try_inline(std::span<const CollectiveCall> group, std::shared_ptr<Request>&);
  /// Queues a group of calls. Throws the failure that poisoned the group of ranks, if there is one, and
  /// Errc::invalid_argument for dependent calls (Coalescer::require_independent()).
  std::shared_ptr<Request> submit(std::span<const CollectiveCall> group);
  /// Blocks until the request is done; drives the engine meanwhile if no other thread does.
  void wait(Request&);
  /// Poisons the group of ranks with Errc::aborted.
  void abort(const std::string& reason) noexcept;
  /// Throws the failure that poisoned the group, if there is one; polls for it if no thread drives. Does not
  /// block.
  void check();
  /// Zeroed memory that peers on this node map.
  std::shared_ptr<std::byte> allocate(std::size_t bytes);
  Registration register_buffer(std::span<std::byte>);
  std::string describe() const;
  /// The algorithm of a call of `bytes`; `reachable`: its buffers are registered on all ranks.
  AlgorithmChoice explain(Collective, std::size_t bytes, bool reachable, DType, ReduceOp) const;

 private:
  struct PendingCall {
    std::shared_ptr<Request> request;
    std::size_t index;
  };
  struct CachedPlan {
    const Algorithm* algorithm;
    int root;
    bool in_place;
    std::unique_ptr<DependencyPlan> plan;
  };

  void check_process() const;
  std::shared_ptr<SharedMemoryAllocator> arena();
  void poll_once(std::unique_lock<SpinFutexLock>&);
  bool is_unattended() const;
  void progress_thread();
  // Called by the driving thread only.
  void progress(const Request* until);
  void progress_step(bool waited_for);
  void accept();
  void start_next();
  void start(const PendingCall&);
  std::size_t coalescable() const;
  void start_coalesced(std::size_t calls);
  void dispatch(const CollectiveCall&);
  const IntranodeAlgorithm* schedule_override(const CollectiveCall&) const;
  void finish_current();
  bool is_inline_eligible(const CollectiveCall&) const;
  void fail_inline(std::unique_lock<SpinFutexLock>&, std::shared_ptr<Request>&);
  std::shared_ptr<Request> enqueue_started(const CollectiveCall&);
  bool advance_current(bool eager);
  void prepare_input(CollectiveCall&, Request&);
  bool is_allowed(const Algorithm&, Collective, bool rounds) const;
  SelectedAlgorithm schedule_for(Collective, std::size_t bytes, bool rounds = false) const;
  void run_schedule(const CollectiveCall&, const Algorithm&, std::size_t slice);
  const DependencyPlan& plan_for(const Algorithm&, int root, bool in_place);
  void finish_point_to_point();
  void call_ended(Request&);
  void on_idle(bool waited_for);
  void poll_control(bool waited_for);
  WaitState wait_state_of(const Request*) const;
  const Request* overdue_request(std::chrono::steady_clock::time_point by) const;
  void check_deadlines(std::chrono::steady_clock::time_point now);
  [[noreturn]] void fail_timeout(const Request&);
  void poison(std::exception_ptr) noexcept;
  bool is_idle() const {
    return !current_.request && queue_.empty() && point_to_point_.idle() && !inbox_changed_.load();
  }

  const Creator creator_;
  const int rank_, size_;
  const NativeOptions options_;
  const AlgorithmOverrides overrides_;
  const std::vector<TuningRule> file_rules_;  // of the tuning file, for this group
  std::unique_ptr<Transport> transport_;      // null after stop()
  const bool oversubscribed_, intra_node_;
  const std::vector<int> node_of_rank_;
  const int nodes_;
  const std::string transport_name_;

  // Guarded by mutex_.
  SpinFutexLock mutex_;
  std::condition_variable_any changed_;       // for waiters: a request ended, or no thread drives
  std::condition_variable_any work_arrived_;  // for the progress thread
  std::deque<std::shared_ptr<Request>> incoming_;
  std::size_t unfinished_ = 0;
  // A thread drives; stop() was called; the progress thread sleeps since there was no call for 1 s.
  bool has_owner_ = false, stopping_ = false, sleeping_ = false;
  std::atomic<int> waiters_{0};  // also read without the lock
  std::exception_ptr failure_;
  std::chrono::steady_clock::time_point last_use_{};
  std::chrono::steady_clock::time_point last_unattended_{};  // last time that no thread waited for a request

  std::atomic<bool> inbox_changed_{false};  // incoming_ or stopping_ changed

  // Owned by the driving thread.
  ScheduleExecutor executor_;
  std::unique_ptr<IntranodeEngine> intranode_;  // null unless all ranks share memory
  bool current_is_intranode_ = false;           // intranode_ runs the current call, else executor_
  PointToPoint point_to_point_;
  std::deque<PendingCall> queue_;
  PendingCall current_{};
  std::size_t calls_in_one_ = 1;  // calls of the group, from current_ on, that run coalesced
  Coalescer coalescer_;
  std::shared_ptr<std::byte> coalescing_buffer_;
  std::deque<std::shared_ptr<Request>> point_to_point_requests_;  // requests with messages in flight
  const Request* queried_request_ = nullptr;           // near its deadline: the wait-for graph was requested
  std::chrono::steady_clock::time_point decide_at_{};  // when the replies are evaluated
  std::uint32_t sequence_ = 0;
  std::vector<CachedPlan> plans_;
  unsigned steps_ = 0;                                               // steps with progress
  std::optional<std::chrono::steady_clock::time_point> idle_since_;  // begin of the steps without progress
  bool may_sleep_ = false;                                           // idle for longer than spin_limit

  std::thread thread_;
};

}  // namespace rz
