#include "sharding/strategy/pass_follower.h"

namespace rz {

double PassFollower::compute_seconds() const {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now - exposed_.total()).count();
}

void PassFollower::end_phase(Phase next) {
  const double now = compute_seconds();
  if (phase_ == Phase::forward) now_.forward += now - phase_start_;
  if (phase_ == Phase::backward) now_.backward += now - phase_start_;
  phase_ = next;
  phase_start_ = now;
}

bool PassFollower::enter(Pass pass) {
  if (pass == Pass::backward) ++backward_depth_;
  if (pass == Pass::backward || backward_depth_ > 0 || phase_ == Phase::forward) return false;
  end_phase(Phase::forward);
  return true;
}

void PassFollower::leave(Pass pass) {
  if (pass == Pass::backward && backward_depth_ > 0) --backward_depth_;
}

void PassFollower::begin_backward() {
  backward_depth_ = 0;
  end_phase(Phase::backward);
}

void PassFollower::end_backward() { end_phase(Phase::none); }

void PassFollower::end_step() {
  last_ = now_;
  now_ = {};
}

void PassFollower::abandon() {
  backward_depth_ = 0;
  phase_ = Phase::none;
  now_ = {};
}

}  // namespace rz
