#pragma once
/// A submission to the MPI backend: one operation, or a group that completes as one.

#include <atomic>
#include <chrono>
#include <exception>
#include <memory>
#include <span>

#include "comm/collective.h"
#include "comm/work.h"

namespace rz::mpi {

class MpiEngine;

/// Complete once all `remaining` operations are. Written by the thread that holds the engine's progress;
/// done() may be called by any thread.
class MpiRequest final : public WorkState {
 public:
  MpiRequest(std::shared_ptr<MpiEngine> engine, std::span<const CollectiveCall> group,
             std::chrono::steady_clock::time_point deadline)
      : operations(group), deadline(deadline), remaining(group.size()), engine_(std::move(engine)) {}

  bool done() const noexcept override;
  void wait() override;
  bool is_complete() const noexcept { return done_.load(std::memory_order_acquire); }
  /// At most once, by the thread that holds the engine's progress.
  void complete(std::exception_ptr error) {
    error_ = std::move(error);
    done_.store(true, std::memory_order_release);
  }

  CallList operations;
  const std::chrono::steady_clock::time_point deadline;
  std::size_t remaining;

 private:
  std::shared_ptr<MpiEngine> engine_;
  std::atomic<bool> done_{false};
  std::exception_ptr error_;
};

}  // namespace rz::mpi
