#pragma once
/// Where a rank is in its update.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "autograd_lite/parameter.h"
#include "sharding/model/runtime.h"

namespace rz {

/// What the passes of this rank have done since zero_grad(): which calls may follow, what runs now, which
/// gradients there are, and how long it took. Errors name the call that is missing. Times are of the host,
/// without its waits for communication. Not thread-safe.
class PassState {
 public:
  /// `members`: number of trainable parameters. `exposed` must outlive this object.
  PassState(std::size_t members, const ExposedTime& exposed);

  // ---- the order of calls
  /// begin_backward(): Errc::invalid_argument if the last pass was not finished.
  void require_may_begin() const;
  /// A gradient is written: Errc::invalid_argument unless a pass was begun.
  void require_begun() const;
  /// finish_gradients(): Errc::unsynchronised unless the last pass synchronises.
  void require_may_finish() const;
  /// zero_grad(): Errc::invalid_argument if a pass that synchronises was not finished.
  void require_may_reset() const;
  /// `call` uses means: Errc::unsynchronised if there are none.
  void require_reduced(const char* call) const;

  /// While holds exceed releases, passes do not synchronise.
  void hold() { ++holds_; }
  void release() { --holds_; }
  bool synchronises() const { return holds_ == 0; }
  /// A pass begins, the last one of an update if `synchronise`: it reduces then, unless passes are held.
  void begin_backward(bool synchronise);
  /// The backward pass is over; its reductions are not.
  void end_backward() { end_phase(Phase::none); }
  /// The reductions are over, and gradients are not means yet.
  void end_reductions() { state_ = State::none; }
  void set_reduced() { state_ = State::reduced; }
  /// The backward pass in progress has failed: only cancel_update() may follow.
  void set_failed() { failed_ = true; }
  /// Every rank has dropped the update because of a failure that all know of.
  void set_dropped() { state_ = State::dropped; }
  /// Gradients are dropped on this rank. No scope is open.
  void reset();
  /// The passes of the update have failed.
  void abandon();
  /// The passes that follow belong to the next update.
  void end_step();

  bool reducing() const { return state_ == State::reducing; }
  bool reduced() const { return state_ == State::reduced; }
  bool dropped() const { return state_ == State::dropped; }

  // ---- what runs
  /// A scope is about to run. Returns whether a forward pass begins with it: the first scope after a backward
  /// pass. A scope that backward runs again belongs to backward.
  bool enter(Pass);
  void leave(Pass);
  /// A forward pass has begun, and no backward pass since.
  bool in_forward() const { return phase_ == Phase::forward; }
  /// A scope is open in backward; forward scopes in it recompute.
  bool in_backward_scope() const { return backward_depth_ > 0; }

  // ---- gradients of this rank, by member
  void mark_used(int member) { used_[static_cast<std::size_t>(member)] = 1; }
  /// The gradient is complete, in a pass that synchronises.
  void mark_ready(int member) { ready_.push_back(member); }
  /// This rank has no data for the pass.
  void set_without_data() { without_data_ = true; }
  /// Members whose gradient was written since reset().
  std::span<const std::uint8_t> used() const { return used_; }
  /// The members of the last pass, as their gradients became ready.
  const std::vector<int>& ready() const { return ready_; }
  bool without_data() const { return without_data_; }

  /// Seconds of all passes of an update.
  struct Times {
    double forward = 0, backward = 0;
  };
  /// The times of the last update that has ended.
  const Times& last_step() const { return last_; }

 private:
  enum class State { none, local, reducing, reduced, dropped };
  enum class Phase { none, forward, backward };
  void require_no_failure(const char* call) const;
  void end_phase(Phase next);

  const ExposedTime& exposed_;
  State state_ = State::none;
  bool failed_ = false;
  int holds_ = 0;
  Phase phase_ = Phase::none;
  int backward_depth_ = 0;  // scopes that are open in backward
  double phase_start_ = 0;  // seconds of computation at the start of the phase
  Times now_, last_;
  std::vector<std::uint8_t> used_;
  std::vector<int> ready_;
  bool without_data_ = false;
};

}  // namespace rz
