#pragma once
/// The order of the calls of an update.

namespace rz {

/// What has become of the gradients since zero_grad(), and which calls may follow. Errors name the call that
/// is missing.
class PassState {
 public:
  /// begin_backward(): Errc::invalid_argument if the last pass was not finished.
  void require_may_begin() const;
  /// A gradient is written: Errc::invalid_argument unless a pass was begun.
  void require_begun() const;
  /// finish_gradients(): Errc::unsynchronised unless the last pass synchronises.
  void require_may_finish() const;
  /// cancel_update(): Errc::invalid_argument if gradients are means.
  void require_may_cancel() const;
  /// zero_grad(): Errc::invalid_argument if a pass that synchronises was not finished.
  void require_may_reset() const;
  /// `call` uses means: Errc::unsynchronised if there are none.
  void require_reduced(const char* call) const;

  /// Whether a pass that begins now reduces.
  bool would_reduce(bool synchronise) const { return synchronise && holds_ == 0; }
  void begin(bool synchronise);
  void set_reduced() { state_ = State::reduced; }
  void reset() { state_ = State::none, failed_ = false; }
  /// The backward pass in progress has failed: only cancel_update() may follow.
  void set_failed() { failed_ = true; }
  /// Every rank has dropped the update because of a failure that all know of.
  void set_dropped() { state_ = State::dropped; }
  bool dropped() const { return state_ == State::dropped; }
  bool reducing() const { return state_ == State::reducing; }
  bool reduced() const { return state_ == State::reduced; }

  /// While holds exceed releases, passes do not synchronise.
  void hold() { ++holds_; }
  void release() { --holds_; }

 private:
  void require_no_failure(const char* call) const;

  enum class State { none, local, reducing, reduced, dropped };
  State state_ = State::none;
  bool failed_ = false;
  int holds_ = 0;
};

}  // namespace rz
