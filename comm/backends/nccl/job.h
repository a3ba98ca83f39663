#pragma once
/// What the NCCL backend keeps of a submission, and of the end that all of them share.

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>

#include "comm/backends/nccl/standing.h"
#include "comm/core/deadline.h"
#include "comm/work.h"

namespace rz::nccl {

/// Whether the group can go on. The first failure counts; whoever meets it is told once NCCL has let go of
/// their memory. Thread-safe.
class Fate {
 public:
  bool failed() const noexcept { return failed_.load(std::memory_order_acquire); }
  /// False: it had failed before.
  bool fail(Failure);
  /// Now whoever waits may throw it, with `more` at the end of its reason.
  void settle(const std::string& more);
  bool settled() const noexcept;
  /// True if it is by then.
  bool settled_within(std::chrono::milliseconds) const noexcept;
  /// Throws the failure, when it is settled.
  [[noreturn]] void raise() const;

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::atomic<bool> failed_{false};
  bool settled_ = false;
  Failure failure_;
};

class Job final : public WorkState {
 public:
  Job(std::shared_ptr<Fate> fate, std::string words, Waiting waiting, std::chrono::milliseconds timeout)
      : words(std::move(words)),
        waiting(std::move(waiting)),
        began(Deadline::Clock::now()),
        timeout(timeout),
        deadline(Deadline::after(timeout)),
        fate_(std::move(fate)) {}

  bool done() const noexcept override;
  void wait() override;
  void wait_on(const Stream&) override;

  /// All of it is in streams: it begins after `ready` and is over at `end`.
  void issue(Event ready, Event end, bool captured);
  bool issued() const { return issued_.load(std::memory_order_acquire); }
  /// Whether the device has arrived at it.
  bool ready() const { return !issued() || ready_.done(); }

  const std::string words;
  const Waiting waiting;
  const Deadline::Clock::time_point began;
  const std::chrono::milliseconds timeout;
  const Deadline deadline;

 private:
  /// True once it has ended well. An event that is reached only since NCCL was aborted does not count.
  bool well() const;

  const std::shared_ptr<Fate> fate_;
  Event ready_, end_;
  bool captured_ = false;
  std::atomic<bool> issued_{false};
  mutable std::atomic<bool> well_{false};
};

}  // namespace rz::nccl
