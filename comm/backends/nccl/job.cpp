#include "comm/backends/nccl/job.h"

#include <thread>

#include "comm/core/error.h"

namespace rz::nccl {

using namespace std::chrono_literals;

bool Fate::fail(Failure failure) {
  const std::lock_guard lock(mutex_);
  if (failed_) return false;
  failure_ = std::move(failure);
  failed_.store(true, std::memory_order_release);
  return true;
}

void Fate::settle(const std::string& more) {
  {
    const std::lock_guard lock(mutex_);
    failure_.reason += more;
    settled_ = true;
  }
  changed_.notify_all();
}

bool Fate::settled() const noexcept {
  const std::lock_guard lock(mutex_);
  return settled_;
}

bool Fate::settled_within(std::chrono::milliseconds limit) const noexcept {
  std::unique_lock lock(mutex_);
  return changed_.wait_until(lock, Deadline::after(limit).at(), [&] { return settled_; });
}

void Fate::raise() const {
  settled_within(10s);  // whoever ends NCCL does so with limits that are shorter
  const std::lock_guard lock(mutex_);
  throw Error(failure_.code, failure_.reason, failure_.culprit);
}

void Job::issue(Event ready, Event end, bool captured) {
  ready_ = std::move(ready);
  end_ = std::move(end);
  captured_ = captured;
  issued_.store(true, std::memory_order_release);
}

bool Job::well() const {
  if (well_.load(std::memory_order_acquire)) return true;
  if (!issued() || (!captured_ && !end_.done()) || fate_->failed()) return false;
  well_.store(true, std::memory_order_release);
  return true;
}

bool Job::done() const noexcept {
  try {
    return well() || (fate_->failed() && fate_->settled());
  } catch (...) {
    return true;  // the device has failed; wait() says how
  }
}

void Job::wait() {
  require(!captured_, Errc::invalid_argument, words,
          " is part of a graph that is being captured, where nothing ends; use wait_on(stream), and wait for "
          "the stream that the graph is launched in");
  const auto spinning_until = Deadline::after(1ms);
  while (!well()) {
    if (fate_->failed()) fate_->raise();
    if (spinning_until.expired())
      std::this_thread::sleep_for(50us);
    else
      std::this_thread::yield();
  }
}

void Job::wait_on(const Stream& stream) {
  if (!well() && fate_->failed()) fate_->raise();
  stream.wait(end_);
}

}  // namespace rz::nccl
