#pragma once
/// What the NCCL backend keeps of a submission, and of the end that all of them share.

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>

#include "comm/backends/nccl/call_progress.h"
#include "comm/core/deadline.h"
#include "comm/work.h"

namespace rz::nccl {

/// Whether the group can go on. The first failure counts; whoever meets it is told once NCCL has let go of
/// their memory. Thread-safe.
class GroupStatus {
 public:
  bool failed() const noexcept { return failed_.load(std::memory_order_acquire); }
  /// False: it had failed before.
  bool fail(Failure);
  /// Now whoever waits may throw it, with `more` at the end of its reason.
  void publish(const std::string& more);
  bool published() const noexcept;
  /// True if it is by then.
  bool wait_published(std::chrono::milliseconds) const noexcept;
  /// Throws the failure, when it is settled.
  [[noreturn]] void rethrow() const;

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::atomic<bool> failed_{false};
  bool published_ = false;
  Failure failure_;
};

class NcclRequest final : public WorkState {
 public:
  NcclRequest(std::shared_ptr<GroupStatus> fate, std::string words, PendingWait waiting,
              std::chrono::milliseconds timeout)
      : description(std::move(words)),
        pending_on(std::move(waiting)),
        submitted_at(Deadline::Clock::now()),
        timeout(timeout),
        deadline(Deadline::after(timeout)),
        group_status_(std::move(fate)) {}

  bool done() const noexcept override;
  void wait() override;
  void wait_on(const Stream&) override;

  /// All of it is in streams: it begins after `ready` and is over at `end`.
  void set_events(Event ready, Event end, bool captured);
  bool issued() const { return issued_.load(std::memory_order_acquire); }
  /// Whether the device has arrived at it.
  bool has_started() const { return !issued() || start_event_.done(); }

  const std::string description;
  const PendingWait pending_on;
  const Deadline::Clock::time_point submitted_at;
  const std::chrono::milliseconds timeout;
  const Deadline deadline;

 private:
  /// True once it has ended well. An event that is reached only since NCCL was aborted does not count.
  bool succeeded() const;

  const std::shared_ptr<GroupStatus> group_status_;
  Event start_event_, end_event_;
  bool captured_ = false;
  std::atomic<bool> issued_{false};
  mutable std::atomic<bool> succeeded_{false};
};

}  // namespace rz::nccl
