#include "sharding/strategy/pass_state.h"

#include <array>

#include "comm/core/error.h"

namespace rz {

void PassState::begin(bool synchronise) {
  state_ = would_reduce(synchronise) ? State::reducing : State::local;
}

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

void PassState::require_may_cancel() const {
  require(state_ != State::reduced, Errc::invalid_argument,
          "cancel_update() after the gradients were reduced on every rank (finish_gradients()); zero_grad() "
          "of the "
          "strategy drops them");
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
