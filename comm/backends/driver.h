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

#include "comm/backends/execution.h"
#include "comm/backends/fused.h"
#include "comm/backends/job.h"
#include "comm/backends/messages.h"
#include "comm/backends/scheduled_options.h"
#include "comm/backends/together.h"
#include "comm/core/process.h"
#include "comm/core/short_lock.h"
#include "comm/forced.h"
#include "comm/select.h"

namespace rz {

class Driver : public std::enable_shared_from_this<Driver> {
 public:
  Driver(int rank, int size, std::unique_ptr<Transport>, ScheduledOptions);
  ~Driver();

  void start_thread();
  /// Ends what is pending with an error, and the thread. Bounded.
  void stop() noexcept;
  /// Instead of the destructor in a child of fork(), where the thread is not and whose conditions may have
  /// waiters that never come back: closes the links, if no thread was at work on them when the child began.
  void abandon() noexcept;

  /// try_at_once() of a call that is like the last one. Throws nothing.
  bool repeat(const BriefCall&, std::shared_ptr<Job>&);
  /// True for a small collective of one host that nothing is before: it is over, unless there is a job.
  /// Throws the failure that poisoned the group, if there is one.
  bool try_at_once(std::span<const Operation> group, std::shared_ptr<Job>&);
  /// Throws the failure that poisoned the group, if there is one.
  std::shared_ptr<Job> submit(std::span<const Operation> group);
  void wait(Job&);
  void abort(const std::string& reason) noexcept;
  /// Throws the failure that poisoned the group, if there is one; looks for it if nobody drives. Never waits.
  void check();
  std::shared_ptr<std::byte> allocate(std::size_t bytes);
  Registration register_buffer(std::span<std::byte>);
  std::string describe() const;
  /// Any thread.
  CallChoice explain(Collective, std::size_t bytes, bool reachable, DType, ReduceOp) const;

 private:
  struct Queued {
    std::shared_ptr<Job> job;
    std::size_t operation;
  };
  /// For whom a job waits.
  struct Wait {
    RankSet debtors;
    int suspect = -1;  // of them
    std::string words;
  };
  struct CachedPlan {
    const Algorithm* algorithm;
    int root;
    bool in_place;
    std::unique_ptr<Plan> plan;
  };

  void check_process() const;
  std::shared_ptr<Arena> arena();
  void look_once(std::unique_lock<ShortLock>&);
  bool was_left() const;
  void progress_thread();
  // All of these are called by the one that drives.
  void drive(const Job* until);
  void step(bool waited_for);
  void accept();
  void start_next();
  void start(const Queued&);
  std::size_t coalescable() const;
  void start_fused(std::size_t calls);
  void run(const Operation&);
  const TogetherWay* streams(const Operation&) const;
  void end_current();
  bool is_quick(const Operation&) const;
  void fail_at_once(std::unique_lock<ShortLock>&, std::shared_ptr<Job>&);
  std::shared_ptr<Job> begin(const Operation&);
  bool advance_current(bool eager);
  void prepare_input(Operation&, Job&);
  bool serves(const Algorithm&, Collective, bool rounds) const;
  Selection schedule_for(Collective, std::size_t bytes, bool rounds = false) const;
  void run_schedule(const Operation&, const Algorithm&, std::size_t slice);
  const Plan& plan_for(const Algorithm&, int root, bool in_place);
  void finish_messages();
  void operation_ended(Job&);
  void idle(bool waited_for);
  void look(bool waited_for);
  Wait wait_of(const Job*) const;
  const Job* late(std::chrono::steady_clock::time_point by) const;
  void check_deadlines(std::chrono::steady_clock::time_point now);
  [[noreturn]] void time_out(const Job&);
  void poison(std::exception_ptr) noexcept;
  bool nothing_left() const {
    return !current_.job && queue_.empty() && messages_.idle() && !attention_.load();
  }

  const Creator creator_;
  const int rank_, size_;
  const ScheduledOptions options_;
  const ForcedAlgorithms forced_;
  const std::vector<TuningRule> tuned_;   // for this group
  std::unique_ptr<Transport> transport_;  // gone after stop()
  const bool crowded_, one_host_;
  const std::vector<int> host_;  // of every rank
  const int hosts_;
  const std::string carrier_;  // what the transport calls itself

  // Guarded by mutex_.
  ShortLock mutex_;
  std::condition_variable_any changed_;       // for waiters: a job ended, or nobody drives any more
  std::condition_variable_any work_arrived_;  // for the progress thread
  std::deque<std::shared_ptr<Job>> incoming_;
  std::size_t unfinished_ = 0;
  bool driven_ = false, stopping_ = false, asleep_ = false;
  std::atomic<int> waiters_{0};  // also read without the lock
  std::exception_ptr failure_;
  std::chrono::steady_clock::time_point last_use_{};
  std::chrono::steady_clock::time_point last_left_{};  // when a call was last left to the thread

  std::atomic<bool> attention_{false};  // incoming_ or stopping_ changed

  // Belongs to whoever drives.
  Execution execution_;
  std::unique_ptr<Together> together_;  // where all ranks share memory
  bool by_together_ = false;            // the current operation
  Messages messages_;
  std::deque<Queued> queue_;
  Queued current_{};
  std::size_t calls_in_one_ = 1;  // of a group, from current_ on, that run as one call
  Fused fused_;
  std::shared_ptr<std::byte> fused_memory_;
  std::deque<std::shared_ptr<Job>> messaging_;  // jobs with messages in flight
  const Job* questioned_ = nullptr;             // near its deadline: the others were asked whom they wait for
  std::chrono::steady_clock::time_point judge_at_{};  // by what they have told
  std::uint32_t sequence_ = 0;
  std::vector<CachedPlan> plans_;
  unsigned rounds_ = 0;                                              // steps
  std::optional<std::chrono::steady_clock::time_point> idle_since_;  // nothing has moved
  bool patient_ = false;                                             // for long

  std::thread thread_;
};

}  // namespace rz
