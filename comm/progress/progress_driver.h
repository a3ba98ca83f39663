#pragma once
/// The progress thread of a process. It progresses what no thread waits for, of all communicators that the
/// process has on the host.
///
/// It goes round its communicators and gives each one that is due a turn, bounded by
/// ProgressWaitPolicy::max_turn and the step that is under way then. No turn sleeps, so a communicator whose
/// peer is slow, stopped or dead costs the others one step per round. When no turn makes progress, the thread
/// sleeps on the descriptors of all communicators with calls in flight, until the first of: an event of one
/// of them, wake(), the next time that one is due.

#include <poll.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "comm/os/fd.h"
#include "comm/os/process.h"

namespace rz {

/// What the thread progresses: a communicator's progress engine. The thread calls all of it.
class Driven {
 public:
  using Time = std::chrono::steady_clock::time_point;

  struct Turn {
    enum State {
      idle,     ///< due again at `next`
      blocked,  ///< its calls wait for an event of begin_sleep(), until `next` at most
      moved     ///< progress; due again after the turns of the others
    } state = idle;
    Time next{};
  };
  /// Progresses for a bounded time. Does not sleep.
  virtual Turn turn() noexcept = 0;

  struct Sleep {
    bool allowed = false;  ///< false: something may have changed, so it is due
    int descriptor = -1;   ///< readable once something may have changed; end_sleep() must follow. -1: none
  };
  /// Before a sleep, after a blocked turn.
  virtual Sleep begin_sleep() noexcept = 0;
  virtual void end_sleep() noexcept = 0;

 protected:
  ~Driven() = default;

 private:
  friend class ProgressDriver;
  std::atomic<bool> woken_{false};  // due at once
  Turn last_;                       // guarded by the driver's mutex
};

/// Thread safe.
class ProgressDriver {
 public:
  /// The driver of this process. Made for the first communicator; its thread, "rz-progress", ends with the
  /// last pointer. The thread may use the processors of the thread that made it. A child of fork() has a
  /// driver of its own.
  static std::shared_ptr<ProgressDriver> of_process();
  /// A driver with a thread of its own, "rz-background", which ends after stop() and may outlive the caller.
  /// It keeps `only` alive.
  static std::shared_ptr<ProgressDriver> in_background(const std::shared_ptr<Driven>& only);

  /// Use the functions above.
  ProgressDriver();
  /// Not on the thread of the process, which it joins.
  ~ProgressDriver();
  ProgressDriver(const ProgressDriver&) = delete;

  /// It is due at once. It must stay valid until remove().
  void add(Driven&);
  /// Returns when the thread no longer uses it. Not on the thread.
  void remove(Driven&);
  /// It is due at once. Takes no lock; a system call only if the thread sleeps.
  void wake(Driven& driven) noexcept {
    driven.woken_.store(true);
    if (asleep_.load() && asleep_.exchange(false)) ring();
  }
  /// Ends the thread after the current turn.
  void stop() noexcept;

 private:
  using Lock = std::unique_lock<std::mutex>;
  using Time = Driven::Time;

  void run(const char* name);
  Driven::Turn::State run_round(Lock&);
  static bool is_due(Driven&, Time now);
  void sleep(Lock&);
  bool prepare_sleep(Driven&, Time& until);
  void poll(Time until) noexcept;
  void end_sleeps();
  void ring() const noexcept;

  const Creator creator_;
  const UniqueFd doorbell_;
  std::atomic<bool> asleep_{false};  // or about to sleep: wake() rings

  // Guarded by mutex_, which the thread releases during turns and sleeps.
  std::mutex mutex_;
  std::condition_variable left_;  // the thread has left a turn or a sleep
  std::vector<Driven*> members_;
  Driven* in_turn_ = nullptr;
  std::vector<Driven*> sleepers_;    // whose end_sleep() must follow
  std::vector<pollfd> descriptors_;  // of the doorbell and the sleepers
  bool stopping_ = false;

  std::thread thread_;  // not of a driver in the background
};

}  // namespace rz
