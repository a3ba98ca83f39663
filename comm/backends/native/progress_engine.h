#pragma once
/// Who moves a communicator's operations: a progress thread, and whoever waits for one of them. At any time
/// one of them drives, all others sleep.
///
/// Operations wake the progress thread only if it has long had nothing to do: their caller mostly waits for
/// them at once, and then drives them itself. While the communicator is in use the thread looks for what
/// nobody waits for: once a millisecond where there is such, else every 16, since each look takes the
/// processor from some rank. In a communicator without calls it looks once a second whether peers have taken
/// memory back, or are gone.

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "comm/backends/native/native_options.h"
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
  /// Ends what is pending with an error, and the thread. Bounded.
  void stop() noexcept;
  /// Instead of the destructor in a child of fork(), where the thread is not and whose conditions may have
  /// waiters that never come back: closes the links, if no thread was at work on them when the child began.
  void abandon() noexcept;

  /// try_inline() of a call that is like the last one. Throws nothing.
  bool try_fast_path(const CallKey&, std::shared_ptr<Request>&);
  /// True for a small collective of one host that nothing is before: it is over, unless there is a job.
  /// Throws the failure that poisoned the group, if there is one.
  bool try_inline(std::span<const CollectiveCall> group, std::shared_ptr<Request>&);
  /// Throws the failure that poisoned the group, if there is one.
  std::shared_ptr<Request> submit(std::span<const CollectiveCall> group);
  void wait(Request&);
  void abort(const std::string& reason) noexcept;
  /// Throws the failure that poisoned the group, if there is one; looks for it if nobody drives. Never waits.
  void check();
  std::shared_ptr<std::byte> allocate(std::size_t bytes);
  Registration register_buffer(std::span<std::byte>);
  std::string describe() const;
  /// Any thread.
  AlgorithmChoice explain(Collective, std::size_t bytes, bool reachable, DType, ReduceOp) const;

 private:
  struct PendingCall {
    std::shared_ptr<Request> request;
    std::size_t index;
  };
  /// For whom a job waits.
  struct WaitState {
    RankSet waiting_on;
    int suspect = -1;  // of them
    std::string text;
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
  // All of these are called by the one that drives.
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
  const std::vector<TuningRule> file_rules_;  // for this group
  std::unique_ptr<Transport> transport_;      // gone after stop()
  const bool oversubscribed_, intra_node_;
  const std::vector<int> node_of_rank_;  // of every rank
  const int nodes_;
  const std::string transport_name_;  // what the transport calls itself

  // Guarded by mutex_.
  SpinFutexLock mutex_;
  std::condition_variable_any changed_;       // for waiters: a job ended, or nobody drives any more
  std::condition_variable_any work_arrived_;  // for the progress thread
  std::deque<std::shared_ptr<Request>> incoming_;
  std::size_t unfinished_ = 0;
  bool has_owner_ = false, stopping_ = false, sleeping_ = false;
  std::atomic<int> waiters_{0};  // also read without the lock
  std::exception_ptr failure_;
  std::chrono::steady_clock::time_point last_use_{};
  std::chrono::steady_clock::time_point last_unattended_{};  // when a call was last left to the thread

  std::atomic<bool> inbox_changed_{false};  // incoming_ or stopping_ changed

  // Belongs to whoever drives.
  ScheduleExecutor executor_;
  std::unique_ptr<IntranodeEngine> intranode_;  // where all ranks share memory
  bool current_is_intranode_ = false;           // the current operation
  PointToPoint point_to_point_;
  std::deque<PendingCall> queue_;
  PendingCall current_{};
  std::size_t calls_in_one_ = 1;  // of a group, from current_ on, that run as one call
  Coalescer coalescer_;
  std::shared_ptr<std::byte> coalescing_buffer_;
  std::deque<std::shared_ptr<Request>> point_to_point_requests_;  // jobs with messages in flight
  const Request* queried_request_ = nullptr;  // near its deadline: the others were asked whom they wait for
  std::chrono::steady_clock::time_point decide_at_{};  // by what they have told
  std::uint32_t sequence_ = 0;
  std::vector<CachedPlan> plans_;
  unsigned steps_ = 0;                                               // steps
  std::optional<std::chrono::steady_clock::time_point> idle_since_;  // nothing has moved
  bool may_sleep_ = false;                                           // for long

  std::thread thread_;
};

}  // namespace rz
