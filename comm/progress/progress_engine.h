#pragma once
/// Progress engine of a communicator. Requests are progressed by exactly one thread at a time, the holder of
/// the progress token: a thread in Work::wait(), otherwise a progress thread
/// (comm/progress/progress_driver.h). All others sleep. The engine knows no collective and no transport: it
/// drives a Progressable.
///
/// The progress thread looks for unattended requests every 1 ms if there was one in the last second,
/// otherwise every 16 ms, since each look competes with the ranks for cores. After 1 s without a call it
/// does not look; a submission then wakes it. A submission does not wake it before, since callers mostly wait
/// at once and then drive the request themselves. While no thread drives it polls for failures. It holds the
/// token only during a step of this engine and while it sleeps until the engine's next event, so that a
/// caller never waits for the step of another communicator.

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "comm/core/error.h"
#include "comm/os/process.h"
#include "comm/os/wait_policy.h"
#include "comm/progress/driving_state.h"
#include "comm/progress/progress_driver.h"
#include "comm/progress/progress_token.h"
#include "comm/progress/progressable.h"
#include "comm/progress/request.h"

namespace rz {

struct ProgressOptions {
  enum Thread {
    none,    ///< requests progress only in submit(), wait(), Request::done() and abort()
    shared,  ///< that of the process
    own      ///< one of its own; stop() lets it close the Progressable in the background
  };

  int rank = 0;                                ///< for messages
  std::chrono::milliseconds timeout{600'000};  ///< of one request, from its submission
  Thread thread = shared;
  std::chrono::milliseconds failure_poll{1'000};  ///< period of poll_idle(), while no thread drives
  std::size_t wake_bytes = ~std::size_t{0};       ///< a submission of so many bytes wakes the thread
  const ProgressWaitPolicy* policy = &normal_wait_policy.progress;
};

/// Two states that change apart: who holds the token, and whether the end has begun.
///
///   token            by
///   idle → inline    try_begin_inline(), while the engine runs and nothing is pending
///   inline → idle    end_inline(), continue_inline()
///   inline → driver  fail_inline(), until it returns
///   idle → driver    wait(), progress(), run_exclusively(), check(), stop(); the progress thread: turn(),
///                    begin_sleep(); in a child of fork() abandon()
///   driver → idle    the same, by release_driver(), or on the progress thread by hand_over(); stop() and
///                    abandon() keep the token for ever
///
///   end                 by
///   running → failed    fail(), of the driver whose step has thrown; abort(), of any thread
///   running → stopping  stop(), which also ends failed ones. Its finish(), on the progress thread if that is
///                       the engine's own, ends what is pending, closes the Progressable and sets the failure
///
///             running                        failed                         stopping
///   idle      submit() queues, wait()        submit() and check() throw     finish() acquires the token
///             drives; turn() after a grace   the failure
///   inline    the call runs                  the call ends by the failure   finish() waits for the call
///                                            that abort() gave its target
///   driver    step() after step              the next accept() throws the   accept() throws Errc::aborted if
///                                            failure, fail() ends all       a request is pending: as failed
class ProgressEngine final : public Driven, public std::enable_shared_from_this<ProgressEngine> {
 public:
  ProgressEngine(std::unique_ptr<Progressable>, const ProgressOptions&);
  ~ProgressEngine();

  /// Begins to be progressed by the thread of the options.
  void start();
  /// Not on the progress thread. Fails all pending requests with Errc::aborted and closes the Progressable.
  /// Waits a few seconds at most for another driving thread.
  void stop() noexcept;
  /// Replaces the destructor in a child of fork(), which has no progress thread, and whose condition variable
  /// may have waiters that do not exist there. Abandons the Progressable if no thread held the
  /// token at fork().
  void abandon() noexcept;

  // Thread safe. In a child of fork() they throw Errc::invalid_argument, except abort().

  /// Queues a group of calls. Throws the failure that poisoned the group of ranks, if there is one.
  std::shared_ptr<Request> submit(std::span<const CollectiveCall> group);
  /// Blocks until the request is complete; drives the engine meanwhile if no other thread does.
  void wait(Request&);
  /// Progresses pending requests once, unless another thread drives.
  void progress() noexcept;
  bool has_thread() const { return options_.thread != ProgressOptions::none; }
  /// Poisons the group of ranks with Errc::aborted.
  void abort(const std::string& reason) noexcept;
  /// Poisons the group of ranks with this error, which is Errc::cancelled, unless it has failed. Returns once
  /// no thread progresses its calls: all have ended. Errc::timeout if another thread does for 5 s. Throws
  /// Errc::peer_lost if that was the failure.
  void cancel(const Error& cause);
  /// After cancel(): Progressable::check_peers().
  void check_peers();
  /// Throws the failure that poisoned the group, if there is one; polls for it if no thread drives. Does not
  /// block.
  void check();
  /// Calls `f` while no thread progresses requests. Errc::timeout if another thread does for 5 s.
  void run_exclusively(const std::function<void()>& f);
  /// Throws unless this is the process that made the engine.
  void check_process() const {
    if (!creator_.is_this_generation()) [[unlikely]]
      fail_in_child();
  }

  // A call that its submitter runs inline, instead of queueing it. Exactly one of the functions that end it
  // follows try_begin_inline() == true.

  /// Acquires the progress token. False if another thread holds it, if requests are pending, or if the group
  /// has failed or is being destroyed.
  bool try_begin_inline() noexcept {
    if (!token_.try_acquire_inline()) return false;
    if (unfinished_.load(std::memory_order_relaxed) == 0 && !ending_.begun.load(std::memory_order_relaxed))
      return true;
    token_.release_inline();
    return false;
  }
  /// The call has ended, or was not begun.
  void end_inline() noexcept { token_.release_inline(); }
  /// The call has begun and goes on as a request, which `adopt` hands to the Progressable.
  std::shared_ptr<Request> continue_inline(const CollectiveCall&, const std::function<void(Request&)>& adopt);
  /// The call has failed, and with it the group. Returns a request that has ended with the error.
  std::shared_ptr<Request> fail_inline(const std::exception_ptr&);

 private:
  using Lock = std::unique_lock<std::mutex>;

  [[noreturn]] void fail_in_child() const;
  std::shared_ptr<Request> make_request(std::span<const CollectiveCall>);
  void finish() noexcept;
  // Of the progress thread.
  Turn turn() noexcept override;
  Sleep begin_sleep() noexcept override;
  void end_sleep() noexcept override;
  // These require the mutex.
  bool acquire_within(std::chrono::seconds limit, Lock&);
  void release_driver();
  void hand_over();
  void wake_thread();
  void with_token(Lock&, const std::function<void()>& f);
  void poll_idle(Lock&);
  Turn drive_unattended(Lock&);
  Turn next_turn();
  // These require the token.
  void drive(const Request& until);
  bool step(bool waited_for);
  std::chrono::microseconds max_wait() const;
  Turn steps(Time begin);
  void accept();
  void end_calls();
  void fail(const std::exception_ptr&) noexcept;

  const Creator creator_;
  const ProgressOptions options_;
  std::unique_ptr<Progressable> target_;  // null after stop()
  ProgressToken token_;
  std::atomic<std::size_t> unfinished_{0};  // requests, queued or in flight; changed with the mutex
  struct {
    bool stopping = false;           // stop() was called
    std::exception_ptr failure;      // the first one
    bool reported = false;           // to target_
    std::atomic<bool> begun{false};  // one of them is set; also read with the token

    void stop() { stopping = true, begun.store(true, std::memory_order_relaxed); }
    void fail(const std::exception_ptr& error) {
      if (!failure) failure = error;
      begun.store(true, std::memory_order_relaxed);
    }
  } ending_;  // changed with the mutex

  // Guarded by mutex_.
  std::mutex mutex_;
  std::condition_variable changed_;  // for waiters: a request ended, or no thread drives
  struct {
    std::deque<std::shared_ptr<Request>> requests;
    std::atomic<bool> changed{false};  // requests or ending_ changed
  } inbox_;
  std::atomic<int> waiters_{0};  // threads that wait for the token; also read without the mutex
  PollSchedule schedule_;
  std::shared_ptr<ProgressDriver> driver_;  // null without a thread

  // Used with the token.
  struct {
    std::deque<std::shared_ptr<Request>> requests;  // oldest first
    std::vector<Request*> ended;                    // one for each call that ended in this step
    IdleTime idle;
  } in_flight_;
};

}  // namespace rz
