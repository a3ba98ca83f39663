#include "comm/work.h"

namespace rz {

bool Work::done() const noexcept { return !state_ || state_->done(); }

void Work::wait() const {
  if (state_) state_->wait();
}

void Work::wait_on(const Stream& stream) const {
  if (!state_) return;
  if (stream.device().kind == Device::host)
    state_->wait();
  else
    state_->wait_on(stream);
}

}  // namespace rz
