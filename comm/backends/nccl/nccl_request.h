#pragma once
/// A submission to the NCCL backend, and the failure state that all submissions of a group share.

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>

#include "comm/backends/nccl/call_progress.h"
#include "comm/core/deadline.h"
#include "comm/work.h"

namespace rz::nccl {

/// Failure state of a group. Only the first failure counts. It is thrown after publish(), that is, once NCCL
/// no longer accesses the callers' memory or its abort has timed out. Thread-safe.
class GroupStatus {
 public:
  bool failed() const noexcept { return failed_.load(std::memory_order_acquire); }
  /// False: the group had failed before.
  bool fail(Failure);
  /// Allows waiters to throw the failure; `more` is appended to its reason.
  void publish(const std::string& more);
  bool published() const noexcept;
  /// Waits until the failure is published; false if the limit passes first.
  bool wait_published(std::chrono::milliseconds) const noexcept;
  /// Waits up to 10 s until the failure is published, then throws it.
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
  NcclRequest(std::shared_ptr<GroupStatus> status, std::string text, PendingWait pending,
              std::chrono::milliseconds timeout)
      : description(std::move(text)),
        pending_on(std::move(pending)),
        submitted_at(Deadline::Clock::now()),
        timeout(timeout),
        deadline(Deadline::after(timeout)),
        group_status_(std::move(status)) {}

  bool done() const noexcept override;
  void wait() override;
  void wait_on(const Stream&) override;

  /// All calls are enqueued: the operation starts after `ready` and is complete at `end`.
  void set_events(Event ready, Event end, bool captured);
  bool issued() const { return issued_.load(std::memory_order_acquire); }
  /// True once the device has reached the operation.
  bool has_started() const { return !issued() || start_event_.done(); }

  const std::string description;
  const PendingWait pending_on;
  const Deadline::Clock::time_point submitted_at;
  const std::chrono::milliseconds timeout;
  const Deadline deadline;

 private:
  /// True once the operation has completed without a failure. An event reached only because NCCL was aborted
  /// does not count.
  bool succeeded() const;

  const std::shared_ptr<GroupStatus> group_status_;
  Event start_event_, end_event_;
  bool captured_ = false;
  std::atomic<bool> issued_{false};
  mutable std::atomic<bool> succeeded_{false};
};

}  // namespace rz::nccl
