#include "sharding/strategy/pass_state.h"

#include <algorithm>
#include <array>
#include <chrono>

#include "comm/core/error.h"

namespace rz {

PassState::PassState(std::size_t members, const ExposedTime& exposed) : exposed_(exposed), used_(members) {
  ready_.reserve(members);
}

void PassState::begin_backward(bool synchronise) {
  state_ = synchronise && synchronises() ? State::reducing : State::local;
  backward_depth_ = 0;
  ready_.clear();
  without_data_ = false;
  end_phase(Phase::backward);
}

void PassState::reset() {
  state_ = State::none;
  failed_ = false;
  backward_depth_ = 0;
  std::ranges::fill(used_, 0);
}

void PassState::abandon() {
  backward_depth_ = 0;
  phase_ = Phase::none;
  now_ = {};
}

void PassState::end_step() {
  last_ = now_;
  now_ = {};
}

// ---- what runs

void PassState::end_phase(Phase next) {
  const auto clock = std::chrono::steady_clock::now().time_since_epoch();
  const double now = std::chrono::duration<double>(clock - exposed_.total()).count();
  if (phase_ == Phase::forward) now_.forward += now - phase_start_;
  if (phase_ == Phase::backward) now_.backward += now - phase_start_;
  phase_ = next;
  phase_start_ = now;
}

bool PassState::enter(Pass pass) {
  if (pass == Pass::backward) ++backward_depth_;
  if (backward_depth_ > 0 || phase_ == Phase::forward) return false;
  end_phase(Phase::forward);
  return true;
}

void PassState::leave(Pass pass) {
  if (pass == Pass::backward && backward_depth_ > 0) --backward_depth_;
}

// ---- the order of calls

void PassState::require_begun() const {
  require(state_ == State::local || state_ == State::reducing, Errc::invalid_argument,
          "a backward pass ran without begin_backward() before it; call backward() of the engine or strategy "
          "to which the model belongs");
}

void PassState::require_no_failure(const char* call) const {
  require(!failed_, Errc::unsynchronised, call,
          " after a backward pass that failed: call cancel_update(), which drops the update on every rank");
}

void PassState::require_may_begin() const {
  require_no_failure("a backward pass");
  require(
      state_ != State::reducing, Errc::invalid_argument,
      "begin_backward() after a pass that synchronised: call finish_gradients() first, or cancel_update() "
      "after an error");
}

void PassState::require_may_finish() const {
  require_no_failure("finish_gradients()");
  require(
      state_ == State::reducing, Errc::unsynchronised,
      "finish_gradients() needs a backward pass that synchronises: begin_backward(true) outside of NoSync");
}

void PassState::require_may_reset() const {
  require_no_failure("zero_grad()");
  require(state_ != State::reducing, Errc::invalid_argument,
          "zero_grad() between begin_backward() and finish_gradients(): call cancel_update() after an error");
}

void PassState::require_reduced(const char* call) const {
  static constexpr std::array why{
      "no backward pass came before it; call begin_backward(), Tape::backward() and finish_gradients()",
      "the last pass only added to this rank's own gradients; end the accumulation with begin_backward(true) "
      "and finish_gradients()",
      "finish_gradients() was not called after the last backward pass", "",
      "the update was cancelled; begin the next one, with backward() of an engine or zero_grad() of a "
      "strategy"};
  require_no_failure(call);
  if (state_ != State::reduced)
    fail(Errc::unsynchronised, call,
         " with unsynchronised gradients: ", why[static_cast<std::size_t>(state_)]);
}

}  // namespace rz
