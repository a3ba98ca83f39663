#include "comm/work.h"

namespace rz {

bool Work::done() const noexcept { return !state_ || state_->done(); }

void Work::wait() const {
  if (state_) state_->wait();
}

void Work::wait_on(const Stream&) const { wait(); }

}  // namespace rz
