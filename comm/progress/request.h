#pragma once
/// What the scheduled backend keeps of a submission: one operation, or a group that ends as one.

#include <atomic>
#include <chrono>
#include <exception>
#include <memory>
#include <span>

#include "comm/collective.h"
#include "comm/work.h"

namespace rz {

class ProgressEngine;

/// `left` operations have to end before the job has. Written by whoever drives; done() by anybody.
class Request final : public WorkState {
 public:
  Request(std::shared_ptr<ProgressEngine> driver, std::span<const CollectiveCall> group,
          std::chrono::steady_clock::time_point deadline)
      : operations(group), deadline(deadline), remaining(group.size()), engine_(std::move(driver)) {}

  bool done() const noexcept override { return done_.load(std::memory_order_acquire); }
  void wait() override;
  /// Only once, by whoever drives.
  void end(std::exception_ptr error) {
    error_ = std::move(error);
    done_.store(true, std::memory_order_release);
  }
  /// After done().
  const std::exception_ptr& error() const { return error_; }

  CallList operations;
  const std::chrono::steady_clock::time_point deadline;
  std::size_t remaining;
  std::shared_ptr<std::byte> staged_input;  // a scaled or copied input

 private:
  std::shared_ptr<ProgressEngine> engine_;
  std::atomic<bool> done_{false};
  std::exception_ptr error_;
};

}  // namespace rz
