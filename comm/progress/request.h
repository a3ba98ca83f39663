#pragma once
/// A submission to a progress engine: one call, or a group that completes as one.

#include <atomic>
#include <chrono>
#include <exception>
#include <memory>
#include <span>

#include "comm/collective.h"
#include "comm/work.h"

namespace rz {

class ProgressEngine;

/// Complete when `remaining` is 0. Written only by the thread that holds the progress token; done() and
/// wait() are thread safe.
class Request final : public WorkState {
 public:
  Request(std::shared_ptr<ProgressEngine> engine, std::span<const CollectiveCall> group,
          std::chrono::steady_clock::time_point deadline)
      : operations(group), deadline(deadline), remaining(group.size()), engine_(std::move(engine)) {}

  /// Without a progress thread it also progresses the engine.
  bool done() const noexcept override;
  void wait() override;
  bool is_complete() const noexcept { return done_.load(std::memory_order_acquire); }
  /// Completes the request; a null error means success. Called once.
  void end(std::exception_ptr error) {
    error_ = std::move(error);
    done_.store(true, std::memory_order_release);
  }

  CallList operations;
  const std::chrono::steady_clock::time_point deadline;
  std::size_t remaining;  // calls that have not ended

 private:
  std::shared_ptr<ProgressEngine> engine_;
  std::atomic<bool> done_{false};
  std::exception_ptr error_;
};

}  // namespace rz
