#pragma once
/// Where a rank is in its update, by the scopes that run, and how long its passes take.

#include <chrono>

#include "autograd_lite/hooks.h"
#include "sharding/model/exposed_time.h"

namespace rz {

/// A forward pass begins with the first scope after a backward pass; a scope that backward runs again belongs
/// to backward. Times are of the host, without its waits for communication. Not thread-safe.
class PassFollower {
 public:
  /// Seconds of all passes of an update.
  struct Times {
    double forward = 0, backward = 0;
  };

  explicit PassFollower(const ExposedTime& exposed) : exposed_(exposed) {}

  /// A scope is about to run. Returns whether a forward pass begins with it.
  bool enter(Pass);
  void leave(Pass);
  void begin_backward();
  /// The backward pass is over.
  void end_backward();
  /// The passes that follow belong to the next update.
  void end_step();
  /// The passes of the update have failed.
  void abandon();

  /// A forward pass has begun, and no backward pass since.
  bool in_forward() const { return phase_ == Phase::forward; }
  /// Of the last update that has ended.
  const Times& last_step() const { return last_; }

 private:
  enum class Phase { none, forward, backward };
  void end_phase(Phase next);
  double compute_seconds() const;

  const ExposedTime& exposed_;
  Phase phase_ = Phase::none;
  int backward_depth_ = 0;  // scopes that are open in backward
  double phase_start_ = 0;  // compute_seconds() at the start of the phase
  Times now_, last_;
};

}  // namespace rz
