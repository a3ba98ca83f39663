#include "sharding/strategies/passes/pass_state.h"

#include <array>

#include "comm/core/error.h"

namespace rz {

void PassState::begin(bool synchronise) {
  state_ = synchronise && holds_ == 0 ? State::reducing : State::local;
}

void PassState::require_begun() const {
  require(state_ == State::local || state_ == State::reducing, Errc::invalid_argument,
          "a backward pass ran without begin_backward() before it; call backward() of the engine or strategy "
          "to which the model belongs");
}

void PassState::require_may_begin() const {
  require(
      state_ != State::reducing, Errc::invalid_argument,
      "begin_backward() after a pass that synchronised: call finish_gradients() first, or cancel_update() "
      "after an error");
}

void PassState::require_may_finish() const {
  require(
      state_ == State::reducing, Errc::unsynchronised,
      "finish_gradients() needs a backward pass that synchronises: begin_backward(true) outside of NoSync");
}

void PassState::require_may_cancel() const {
  require(state_ != State::reduced, Errc::invalid_argument,
          "cancel_update() after finish_gradients(): zero_grad() forgets the gradients");
}

void PassState::require_may_reset() const {
  require(state_ != State::reducing, Errc::invalid_argument,
          "zero_grad() between begin_backward() and finish_gradients(): call cancel_update() after an error");
}

void PassState::require_reduced(const char* call) const {
  static constexpr std::array why{
      "no backward pass came before it; call begin_backward(), Tape::backward() and finish_gradients()",
      "the last pass only added to this rank's own gradients; end the accumulation with begin_backward(true) "
      "and finish_gradients()",
      "finish_gradients() was not called after the last backward pass"};
  if (state_ != State::reduced)
    fail(Errc::unsynchronised, call,
         " with unsynchronised gradients: ", why[static_cast<std::size_t>(state_)]);
}

}  // namespace rz
